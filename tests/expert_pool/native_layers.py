"""Random layers for the native kernels, their exact result, and how far rounding may take it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from core.model_shape import PARAM_ALIGN_BYTES, SLOT_ALIGN_BYTES, align_up
from expert_pool.checkpoint_index import ParamSpec
from expert_pool.grouped_linear import ExpertGroup
from expert_pool.kernels.activation import Activation
from expert_pool.kernels.build import BuildError, build, compiler
from expert_pool.kernels.layer_kernel import LayerKernel
from expert_pool.kernels.library import open_kernels
from expert_pool.slots import SlotArena

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
CLAMPED = "clamped"
"""Of gates alone; with a limit that random values reach."""
LAYOUTS = ("rows", "transposed", "interleaved")
_ALPHA, _LIMIT = 1.702, 1.5
FUNCTIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
_UNIT = 2.0**-8
"""Largest relative error of rounding to bf16."""
_SUM = 2.0**-23
"""Of one step of a sum in float32."""


def kernels_or_skip(name: str = "native"):
    """The kernels of an instruction set; skips where they cannot be had, fails where they should.

    They are compiled if they are not, so that changed sources are never tested by an old library.
    """
    try:
        compiler()
    except BuildError as error:
        pytest.skip(str(error))
    build()
    try:
        return open_kernels(name)
    except BuildError as error:
        if name == "native":
            raise
        pytest.skip(str(error))


@dataclass
class Layer:
    """Experts in slots, `[E, 2I or I, H]`, `[E, H, I]` and perhaps biases.

    Or transposed, `[E, H, 2I]`, `[E, I, H]`; interleaved, gate and up alternate as well.
    """

    hidden: int
    inner: int
    activation: str
    gated: bool
    arena: SlotArena
    params: list[ParamSpec]
    layout: str = "rows"

    @property
    def found(self) -> Activation:
        """Its activation as the kernels know it."""
        interleaved = self.layout == "interleaved"
        if self.activation == CLAMPED:
            return Activation(len(ACTIVATIONS), interleaved, _ALPHA, _LIMIT)
        return Activation(ACTIVATIONS.index(self.activation), interleaved)

    def kernel(self, name: str = "native") -> LayerKernel:
        transposed = self.layout != "rows"
        return LayerKernel(kernels_or_skip(name), self.arena, self.params, self.found, transposed)

    def group(self, slots: list[int], counts: list[int]) -> ExpertGroup:
        return ExpertGroup(self.arena, np.array(slots), np.array(counts), torch.device("cpu"))

    @property
    def up(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"

    def weight(self, name: str, slot: int) -> torch.Tensor | None:
        """As if it lay in rows, gates first."""
        view = self.arena.views.get(name)
        if view is None:
            return None
        found = view[slot].double()
        if self.layout != "rows" and found.dim() == 2:
            found = found.T
        if self.layout == "interleaved" and name.startswith("gate_up"):
            found = torch.cat((found[::2], found[1::2]))
        return found

    def module(self) -> SimpleNamespace:
        function = FUNCTIONS.get(self.activation)

        def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
            if self.layout == "interleaved":
                gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            else:
                gate, up = gate_up.chunk(2, dim=-1)
            if function is None:
                gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
                return (up + 1) * (gate * torch.sigmoid(gate * _ALPHA))
            return function(gate) * up

        return SimpleNamespace(
            has_gate=self.gated,
            act_fn=function,
            _apply_gate=apply_gate,
            is_transposed=self.layout != "rows",
            has_post_expert_norm=False,
            alpha=_ALPHA,
            limit=_LIMIT,
        )

    def exact(self, rows: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[S, H]` through one expert in float64, and the largest error of each output.

        The error follows the roundings of the kernels: sums in float32, then bf16 after each
        projection, each bias, the activation and the product.
        """
        rows = rows.double()
        up, error = _projected(
            rows, 0, self.weight(self.up, slot), self.weight(f"{self.up}_bias", slot)
        )
        if self.gated:
            (gate, other), (gate_error, other_error) = up.chunk(2, -1), error.chunk(2, -1)
        else:
            gate, gate_error = up, error
        # None of these functions is steeper than this.
        steep = 2 * (gate.abs() + gate_error) if self.activation == "relu2" else 1.13
        if self.activation == CLAMPED:
            gate, other = gate.clamp(max=_LIMIT), other.clamp(-_LIMIT, _LIMIT) + 1
            other_error = other_error + 1.01 * _UNIT * (other.abs() + other_error)
            inner = gate * torch.sigmoid(gate * _ALPHA)
            # x times the sigmoid's slope at x is never more than a quarter.
            gate_error = gate_error + _UNIT * gate.abs() / 4
        else:
            inner = FUNCTIONS[self.activation](gate)
        inner_error = steep * gate_error + 2.1 * _UNIT * inner.abs() + 1e-6 * gate.abs()
        if self.activation == "relu2":
            inner_error = inner_error + 2 * _UNIT * inner
        if self.gated:
            inner_error = (
                inner_error * (other.abs() + other_error)
                + inner.abs() * other_error
                + 1.1 * _UNIT * (inner * other).abs()
                + _UNIT * inner_error * (other.abs() + other_error)
            )
            inner = inner * other
        return _projected(
            inner, inner_error, self.weight("down_proj", slot), self.weight("down_proj_bias", slot)
        )


def _projected(rows, error, weight, bias):
    out = rows @ weight.T
    size = rows.abs() @ weight.abs().T
    error = error @ weight.abs().T if isinstance(error, torch.Tensor) else 0
    error = error + weight.shape[-1] * _SUM * size
    error = error + 1.01 * _UNIT * (out.abs() + error)
    if bias is not None:
        out = out + bias
        error = error + 1.01 * _UNIT * (out.abs() + error)
    return out, error + 1e-30


def make_layer(
    hidden: int,
    inner: int,
    activation: str = "silu",
    gated: bool = True,
    biased: bool = False,
    experts: int = 3,
    seed: int = 0,
    layout: str = "rows",
) -> Layer:
    assert gated or layout != "interleaved"
    generator = torch.Generator().manual_seed(seed)
    up = "gate_up_proj" if gated else "up_proj"
    shapes = {up: ((1 + gated) * inner, hidden), "down_proj": (hidden, inner)}
    if layout != "rows":
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if biased:
        shapes |= {f"{up}_bias": ((1 + gated) * inner,), "down_proj_bias": (hidden,)}
    params, end = [], 0
    for name, shape in shapes.items():
        params.append(ParamSpec(name, shape, "bfloat16", end, 2 * math.prod(shape)))
        end = align_up(end + 2 * math.prod(shape), PARAM_ALIGN_BYTES)
    arena = SlotArena(params, align_up(end, SLOT_ALIGN_BYTES), experts, torch.device("cpu"))
    for slot in range(experts):
        # What lies between parameters is never read: NaN would show.
        arena.slot(slot).view(torch.bfloat16).fill_(float("nan"))
    for view in arena.views.values():
        depth = view.shape[-1] if layout == "rows" else view.shape[1]
        view.copy_(torch.randn(view.shape, generator=generator) / math.sqrt(depth))
    return Layer(hidden, inner, activation, gated, arena, params, layout)
