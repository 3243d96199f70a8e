"""What is checked before anything starts."""

import pytest

from app.commands.serve import describe, logical_cpus
from app.preflight import check_model
from app.settings import Settings
from core.errors import BudgetError
from tests.app.test_cli import DEMO_MODEL


def settings(**sections):
    return Settings.model_validate({"model": str(DEMO_MODEL), **sections})


def test_the_plan_of_the_demo_model_adds_up():
    plan = check_model(settings(pool={"expert_memory": "50%"}), DEMO_MODEL)
    layers = plan.shape.moe_layers
    assert plan.slots_by_layer == tuple(layer.num_experts // 2 for layer in layers)
    assert plan.slots_bytes == plan.shape.all_experts_bytes // 2
    parts = plan.shape.backbone_bytes + plan.slots_bytes + plan.kv_bytes + plan.scratch_bytes
    assert plan.need_bytes == parts
    assert plan.shape.model_type in describe(plan)


def test_kv_pages_are_bounded_by_what_all_sequences_can_use():
    engine = {"kv_memory": "1GiB", "max_sequences": 1, "context_tokens": 16}
    plan = check_model(settings(engine=engine), DEMO_MODEL)
    assert plan.kv_bytes == plan.shape.kv_block_bytes(16)


@pytest.mark.parametrize(
    "sections",
    [
        {"pool": {"expert_memory": "0%"}},
        {"pool": {"expert_memory": 4096}},
        {"engine": {"kv_memory": 1}},
        {"engine": {"scratch_memory": "900TiB"}},
    ],
)
def test_too_little_memory_names_need_and_have(sections):
    with pytest.raises(BudgetError) as refused:
        check_model(settings(**sections), DEMO_MODEL)
    assert "need" in str(refused.value)
    assert "have" in str(refused.value) or "has" in str(refused.value)


def test_ray_is_told_of_cpus_enough_for_every_replica():
    many = settings(serving={"replicas": 40, "rank_cpus": 2})
    assert logical_cpus(many) >= 40 * 2.1
