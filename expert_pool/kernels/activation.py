"""Which activation and gating an experts module has, found by what it does to numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

_FUNCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.silu,
    lambda x: functional.gelu(x, approximate="tanh"),
    functional.gelu,
    functional.relu,
    lambda x: functional.relu(x).square(),
)
"""In the order of `enum Activation` of native/experts.h."""
_CLAMPED_SWIGLU = len(_FUNCTIONS)


@dataclass(frozen=True)
class Activation:
    """What stands between an expert's projections, of what the kernels can compute."""

    number: int
    """Of `enum Activation`."""
    is_interleaved: bool = False
    """Gates and what they gate alternate; else all gates come first."""
    alpha: float = 0.0
    limit: float = 0.0
    """Of the clamped SwiGLU of gpt-oss."""

    def gate(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        """What it makes of gates and what they gate, apart from roundings."""
        if self.number == _CLAMPED_SWIGLU:
            gate = gate.clamp(max=self.limit)
            if up is not None:
                up = up.clamp(-self.limit, self.limit) + 1
            found = gate * torch.sigmoid(gate * self.alpha)
        else:
            found = _FUNCTIONS[self.number](gate)
        return found if up is None else found * up


def activation_of(module: Any) -> Activation | None:
    """The module's activation; None for any other than those that the kernels compute."""
    # Large values too: a clamp shows nowhere else.
    few = torch.linspace(-20, 20, 1001)
    gate = torch.cat((few, few * 1000))
    up = torch.cat((torch.linspace(-3, 5, 1001), torch.linspace(-1000, 1000, 1001)))[
        torch.randperm(gate.numel(), generator=torch.Generator().manual_seed(0))
    ]
    for activation in _candidates(module):
        try:
            # Copies: it may write in place.
            if not module.has_gate:
                found, expected = module.act_fn(gate.clone()), activation.gate(gate, None)
            else:
                both = (gate, up)
                together = torch.stack(both, -1 if activation.is_interleaved else 0)
                found = module._apply_gate(together.reshape(1, -1))
                expected = activation.gate(gate, up).unsqueeze(0)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return None  # it wants something else than rows of numbers; torch has it
        if found.shape != expected.shape:
            continue
        # Where an activation vanishes, its last bits count times what is gated.
        size = expected.abs() + (up.abs().clamp(min=1) if module.has_gate else 1)
        if bool(((found - expected).abs() <= 1e-5 * size).all()):
            return activation
    return None


def _candidates(module: Any) -> Iterator[Activation]:
    yield from (Activation(number) for number in range(len(_FUNCTIONS)))
    if not module.has_gate:
        return
    # Alternating gates are those of transposed weights alone.
    if module.is_transposed:
        yield from (Activation(number, is_interleaved=True) for number in range(len(_FUNCTIONS)))
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float | int) and isinstance(limit, float | int):
        # Clamping bf16 values clamps at a bf16 value.
        limit = float(torch.tensor(float(limit)).bfloat16())
        for is_interleaved in (True, False) if module.is_transposed else (False,):
            yield Activation(_CLAMPED_SWIGLU, is_interleaved, float(alpha), limit)
