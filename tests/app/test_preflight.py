"""What is checked before anything starts."""

import pytest
import torch

from app.commands.serve import logical_cpus
from app.memory_page import describe
from app.preflight import check_models
from app.settings import Settings
from core.errors import BudgetError
from expert_pool import host_memory
from tests.app.test_cli import DEMO_MODEL


def settings(**sections):
    return Settings.model_validate({"model": str(DEMO_MODEL), **sections})


def check_model(asked, folder):
    (plan,) = check_models(asked, [folder])
    return plan


def test_the_plan_of_the_demo_model_adds_up():
    plan = check_model(settings(pool={"expert_memory": "50%"}), DEMO_MODEL)
    layers = plan.shape.moe_layers
    assert plan.slots_by_layer == tuple(layer.num_experts // 2 for layer in layers)
    assert plan.slots_bytes == plan.shape.all_experts_bytes // 2
    parts = plan.shape.backbone_bytes + plan.slots_bytes + plan.kv_bytes + plan.scratch_bytes
    assert plan.need_bytes == parts
    assert plan.shape.model_type in describe([plan])


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


@pytest.mark.parametrize("memory", ["900TiB", "all", "10%", "off", "auto", 4096])
def test_the_host_tier_is_part_of_the_plan(memory):
    plan = check_model(settings(pool={"host_memory": memory}), DEMO_MODEL)
    everything = plan.shape.all_experts_bytes
    expected = {"off": 0, "auto": 0, 4096: 4096}.get(memory, everything)
    assert plan.host_bytes == expected, "auto: with a slot for each, none is read twice"
    assert "not needed" in describe([plan])
    some = settings(pool={"host_memory": memory, "expert_memory": "50%"})
    described = describe([check_model(some, DEMO_MODEL)])
    assert ("page cache" in described) == (memory != "off")


def test_experts_that_do_not_fit_slots_stay_in_the_page_cache_where_there_is_room():
    plan = check_model(settings(pool={"expert_memory": "50%"}), DEMO_MODEL)
    assert plan.host_bytes == plan.shape.all_experts_bytes


def test_prompts_that_pass_layer_by_layer_have_their_memory_in_the_plan():
    few, every = (
        check_model(settings(pool={"expert_memory": memory}), DEMO_MODEL)
        for memory in ("50%", "100%")
    )
    assert few.scratch_bytes - every.scratch_bytes == settings().engine.prefill_memory


@pytest.mark.parametrize("taken", [0, 1])
def test_a_host_tier_that_does_not_fit_names_need_and_have(monkeypatch, taken):
    plan = check_model(settings(pool={"host_memory": "off"}), DEMO_MODEL)
    everything = plan.shape.all_experts_bytes
    have = plan.need_bytes + everything - taken
    monkeypatch.setattr(host_memory, "available_bytes", lambda: have)
    asked = settings(pool={"host_memory": "all"})
    if not taken:
        assert check_model(asked, DEMO_MODEL).host_bytes == everything
        return
    left = everything - taken
    with pytest.raises(BudgetError, match=f"need {everything} bytes.*have {left} bytes"):
        check_model(asked, DEMO_MODEL)


def test_each_replica_needs_its_own_memory(monkeypatch):
    one = check_model(settings(), DEMO_MODEL)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * one.need_bytes - 1)
    check_model(settings(serving={"replicas": 2}), DEMO_MODEL)
    with pytest.raises(BudgetError, match=f"need {3 * one.need_bytes} bytes.*3 replicas"):
        check_model(settings(serving={"replicas": 3}), DEMO_MODEL)


def several(**sections):
    second = {"name": "second", "model": str(DEMO_MODEL), "replicas": 2}
    group = {"name": "second", "group": "small", "pool": {"expert_memory": "25%"}}
    return settings(models=[second, group], **sections)


def test_all_models_and_groups_are_in_one_plan():
    plans = check_models(several(pool={"expert_memory": "50%"}), [DEMO_MODEL] * 3)
    assert [plan.title for plan in plans] == [DEMO_MODEL.name, "second", "second (small)"]
    first, second, small = plans
    assert first.slots_bytes == second.slots_bytes == 2 * small.slots_bytes
    assert second.replicas == 2
    said = describe(plans)
    assert "second (small):" in said and "for 4 replicas" in said


def test_what_fits_alone_and_not_together_is_refused(monkeypatch):
    off = {"pool": {"host_memory": "off"}}
    plans = check_models(several(**off), [DEMO_MODEL] * 3)
    together = sum(plan.all_need_bytes for plan in plans)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: together)
    check_models(several(**off), [DEMO_MODEL] * 3)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: together - 1)
    with pytest.raises(BudgetError, match=rf"need {together} bytes.*second \(small\)"):
        check_models(several(**off), [DEMO_MODEL] * 3)


def test_groups_of_a_model_share_its_host_tier(monkeypatch):
    half = {"pool": {"host_memory": "all", "expert_memory": "50%"}}
    plans = check_models(several(**half), [DEMO_MODEL] * 3)
    need = sum(plan.all_need_bytes for plan in plans) + plans[0].shape.all_experts_bytes
    monkeypatch.setattr(host_memory, "available_bytes", lambda: need)
    check_models(several(**half), [DEMO_MODEL] * 3)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: need - 1)
    with pytest.raises(BudgetError, match="host memory: need"):
        check_models(several(**half), [DEMO_MODEL] * 3)


def test_each_replica_on_a_gpu_has_one_of_its_own(monkeypatch):
    on_gpus = several(engine={"device": "cuda:0"}, pool={"host_memory": "off"})
    have = {"bytes": 1 << 40, "gpus": 4}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (have["bytes"], 1 << 41))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: have["gpus"])
    plans = check_models(on_gpus, [DEMO_MODEL] * 3)
    assert "GPUs: 4, one for each replica" in describe(plans)
    have["bytes"] = max(plan.need_bytes for plan in plans)
    assert check_models(on_gpus, [DEMO_MODEL] * 3), "each fits, and they are not together"
    have["bytes"] -= 1
    with pytest.raises(BudgetError, match="memory of cuda:0: need"):
        check_models(on_gpus, [DEMO_MODEL] * 3)
    have["gpus"] = 3
    said = rf"GPUs: need 4.*{DEMO_MODEL.name} 1, second 2, second \(small\) 1\), have 3"
    with pytest.raises(BudgetError, match=said):
        check_models(on_gpus, [DEMO_MODEL] * 3)


def test_ray_is_told_of_cpus_enough_for_every_replica():
    many = settings(serving={"replicas": 40, "rank_cpus": 2})
    assert logical_cpus(many) >= 40 * 2.1
    assert logical_cpus(several(serving={"rank_cpus": 30})) >= 4 * 30
