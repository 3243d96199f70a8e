"""Conversions that no family of the table needs: one expert at a time equals all at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
)

from core.errors import CheckpointError
from expert_pool.checkpoint_index import ParamSpec
from expert_pool.expert_layout import ExpertLayout
from expert_pool.safetensors_header import TensorEntry
from expert_pool.transformers_private import TargetSource

EXPERTS = 3


def entry(tensor: torch.Tensor, offset: int) -> TensorEntry:
    return TensorEntry(0, offset, tensor.nbytes, "float32", tuple(tensor.shape))


def layout_of(
    patterns: list[str], operations: list[Any], tensors: dict[str, torch.Tensor], shape: tuple
) -> tuple[ExpertLayout, bytes]:
    param = ParamSpec("w", shape, "float32", 64, 4 * math.prod(shape))
    layout = ExpertLayout("experts", EXPERTS, [param])
    converter = WeightConverter(patterns, "experts.w", operations)
    entries, data = {}, b""
    for name, tensor in tensors.items():
        entries[name] = entry(tensor, len(data))
        data += tensor.numpy().tobytes()
    keys = {
        pattern: [n for n in tensors if n.endswith(pattern.rpartition("*")[2])]
        for pattern in patterns
    }
    layout.add(TargetSource("experts.w", converter, keys), entries)
    return layout, data


def assembled(layout: ExpertLayout, data: bytes, expert: int, shape: tuple) -> torch.Tensor:
    raw = [
        torch.frombuffer(bytearray(b"x" + data[start : start + n]), dtype=torch.uint8)[1:]
        for _, start, n in layout.pieces(expert)
    ]
    slot = torch.zeros(64 + 4 * math.prod(shape), dtype=torch.uint8)
    layout.assemble(raw, slot)
    return slot[64:].view(torch.float32).view(shape)


@pytest.mark.parametrize(
    ("operations", "whole", "shape"),
    [
        ([Transpose(1, 2)], lambda t: t.transpose(1, 2), (6, 4)),
        ([Interleave(dim=1)], lambda t: torch.cat([t[:, ::2], t[:, 1::2]], 1), (4, 6)),
    ],
)
def test_stacked_experts_are_converted_one_by_one(
    operations: list[Any], whole: Any, shape: tuple
) -> None:
    stacked = torch.randn(EXPERTS, 4, 6)
    layout, data = layout_of(["fused"], operations, {"fused": stacked}, shape)
    assert layout.placement is None
    for expert in range(EXPERTS):
        assert torch.equal(assembled(layout, data, expert, shape), whole(stacked)[expert])


def test_gate_and_up_of_separate_experts_land_one_after_the_other() -> None:
    tensors = {
        f"experts.{e}.{name}": torch.randn(2, 6) for name in ("up", "gate") for e in range(EXPERTS)
    }
    operations = [MergeModulelist(dim=0), Concatenate(dim=1)]
    layout, data = layout_of(["experts.*.gate", "experts.*.up"], operations, tensors, (4, 6))
    assert layout.placement == ((0, 64), (1, 64 + 48))
    for e in range(EXPERTS):
        expected = torch.cat([tensors[f"experts.{e}.gate"], tensors[f"experts.{e}.up"]])
        assert torch.equal(assembled(layout, data, e, (4, 6)), expected)


def test_gate_and_up_side_by_side_are_not_placed() -> None:
    tensors = {
        f"experts.{e}.{name}": torch.randn(2, 6) for name in ("up", "gate") for e in range(EXPERTS)
    }
    operations = [MergeModulelist(dim=0), Concatenate(dim=2)]
    layout, data = layout_of(["experts.*.gate", "experts.*.up"], operations, tensors, (2, 12))
    assert layout.placement is None
    expected = torch.cat([tensors["experts.1.gate"], tensors["experts.1.up"]], dim=1)
    assert torch.equal(assembled(layout, data, 1, (2, 12)), expected)


@pytest.mark.parametrize("operations", [[Transpose(0, 1)], [SplitModulelist(dim=0)]])
def test_conversions_across_experts_are_refused(operations: list[Any]) -> None:
    with pytest.raises(CheckpointError, match=r"experts\.w"):
        layout_of(["fused"], operations, {"fused": torch.randn(EXPERTS, 4, 6)}, (4, 6))
