"""Public reports about routing arithmetic, as cases: M6, M7, M9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.backbone import Backbone
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from tests.engine.forced_steps import token_ids
from tests.models.families import FAMILIES, make_checkpoint

IDS = torch.tensor([token_ids(5, 24)])


def ours_and_stock(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    index = CheckpointIndex.open(path)
    pool = ExpertPool(index, PoolSettings(expert_memory=index.shape.min_slots_bytes))
    model = Backbone.open(index, pool).model
    stock = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.inference_mode():
        pool.begin_step()
        ours = model(IDS).logits
        pool.end_step()
        theirs = stock(IDS).logits
    pool.close()
    return ours, theirs


def assert_each_equals_stock_and_no_two_alike(paths: list[Path]) -> None:
    seen: list[torch.Tensor] = []
    for path in paths:
        ours, theirs = ours_and_stock(path)
        spread = theirs.max() - theirs.min()
        assert (ours - theirs).abs().max() <= 1e-4 * spread
        # A setting that changed nothing would make the comparison above an empty one.
        assert all((ours - other).abs().max() > 0.01 * spread for other in seen)
        seen.append(ours)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_m6_top_k_weights_normalised_or_not(family: str, tmp_path: Path) -> None:
    paths = [make_checkpoint(family, tmp_path, norm_topk_prob=norm) for norm in (False, True)]
    assert_each_equals_stock_and_no_two_alike(paths)


def test_m7_routed_scaling_factor(tmp_path: Path) -> None:
    paths = [
        make_checkpoint("deepseek_v3", tmp_path, routed_scaling_factor=factor)
        for factor in (1.0, 2.5, 16.0)
    ]
    assert_each_equals_stock_and_no_two_alike(paths)


@pytest.mark.parametrize(
    ("family", "changes", "moe_layers"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 2, "num_hidden_layers": 4}, [2, 3]),
        ("glm4_moe", {}, [1, 2]),
        ("qwen2_moe", {}, [0, 2]),
        ("jamba", {}, [1, 3]),
    ],
)
def test_m9_load_statistics_belong_to_the_right_layer(
    family: str, changes: dict[str, Any], moe_layers: list[int], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, **changes)
    index = CheckpointIndex.open(path)
    assert [layer.decoder_layer for layer in index.layers] == moe_layers
    pool = ExpertPool(index, PoolSettings(expert_memory="all"))
    model = Backbone.open(index, pool).model
    stock = AutoModelForCausalLM.from_pretrained(path).eval()
    chosen: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(stock.get_decoder().layers):
        block = (
            next(m for m in layer.modules() if hasattr(m, "experts"))
            if (number in moe_layers)
            else None
        )
        if block is not None:
            block.experts.register_forward_pre_hook(
                lambda _, args, number=number: chosen.__setitem__(number, args[1])
            )
    with torch.inference_mode():
        pool.begin_step()
        model(IDS)
        stats = pool.end_step()
        stock(IDS)
    pool.close()
    tokens, top_k = IDS.numel(), index.layers[0].top_k
    assert sorted(chosen) == moe_layers
    for ordinal, number in enumerate(moe_layers):
        loads = torch.bincount(chosen[number].flatten(), minlength=pool.loads.shape[1])
        assert pool.loads[ordinal].tolist() == loads.tolist()
    assert pool.loads[0].tolist() != pool.loads[1].tolist()
    assert stats.routed_pairs == tokens * top_k * len(moe_layers) == pool.loads.sum()


def test_the_table_covers_dense_first_layers_and_scaling() -> None:
    assert FAMILIES["deepseek_v3"].config["first_k_dense_replace"] == 1
    assert FAMILIES["deepseek_v3"].config["routed_scaling_factor"] != 1.0
