"""`coterie verify --parity`: one layer at a time, equal to stock, and able to fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.cli import main
from engine import parity
from engine.parity import LayerParity, check_parity
from expert_pool.checkpoint_index import CheckpointIndex
from tests.models.families import FAMILIES, cached_checkpoint

ROUNDING = 1e-6
"""Of the range. In fp32 torch's vector loops end in a scalar remainder; where it falls depends on
the processor's vector width, and stock activates the rows of all experts together."""


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_stock_is_stock_and_the_pool_equals_it(family: str) -> None:
    folder = cached_checkpoint(family)
    index = CheckpointIndex.open(folder)
    ids = torch.arange(3, 30)[None]
    found: list[LayerParity] = []
    with parity._open_twin(index, found.append) as twin, torch.inference_mode():
        streamed = parity._run(twin, ids)
        model = AutoModelForCausalLM.from_pretrained(folder)
        expected = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(streamed, expected)
    assert [layer.decoder_layer for layer in found] == [x.decoder_layer for x in index.layers]
    for layer in found:
        assert layer.passed, layer
        assert layer.unequal_experts == 0
        if family != "llama4_text":
            assert layer.max_delta <= ROUNDING * layer.output_range


def test_one_layer_has_storage_at_a_time() -> None:
    index = CheckpointIndex.open(cached_checkpoint("qwen3_moe", "bfloat16", 0, 3))
    seen = []

    def note(layer: LayerParity) -> None:
        stored = [
            number
            for model in (twin.stock, twin.pooled)
            for number, module in enumerate(model.model.layers)
            if not all(parameter.is_meta for parameter in module.parameters())
        ]
        seen.append(stored)
        # The pooled layer was dropped before its result is told; a pool that is still known to a
        # module would keep its slots.
        assert stored == [layer.decoder_layer]
        assert not any("_coterie" in vars(module) for module in twin.pooled.modules())

    with parity._open_twin(index, note) as twin, torch.inference_mode():
        parity._run(twin, torch.arange(3, 30)[None])
        assert all(p.is_meta for layer in twin.stock.model.layers for p in layer.parameters())
    assert len(seen) == len(index.layers)


def test_both_dtypes_are_compared_where_they_differ() -> None:
    found: list[LayerParity] = []
    check_parity(CheckpointIndex.open(cached_checkpoint("gpt_oss", "bfloat16", 0, 3)), found.append)
    assert [layer.dtype for layer in found] == ["bfloat16"] * 3 + ["float32"] * 3
    assert all(layer.passed for layer in found)
    assert all(layer.max_delta == 0.0 for layer in found if layer.dtype == "bfloat16")
    assert all(layer.max_delta <= ROUNDING * layer.output_range for layer in found)


def test_experts_read_in_the_wrong_order_are_found() -> None:
    index = CheckpointIndex.open(cached_checkpoint("qwen3_moe"))
    runs = index._layouts[1]._runs
    runs[1], runs[2] = runs[2], runs[1]
    found: list[LayerParity] = []
    check_parity(index, found.append)
    assert [layer.passed for layer in found] == [True, False]
    assert found[1].unequal_experts == 16
    assert found[1].max_delta > 0.01


def test_command_prints_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(cached_checkpoint("qwen3_moe"), tmp_path / "model")
    for arguments in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(folder), "--parity", *arguments])
        assert not ended.value.code
    out = capsys.readouterr().out
    assert "layer   2 float32" in out
    report = json.loads(out.splitlines()[-1])
    assert [layer["passed"] for layer in report["parity"]] == [True, True]
