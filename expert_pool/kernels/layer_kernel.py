"""One MoE layer in the native kernels: which layers they can compute, and how a call goes.

An expert's rows come out the same whatever slots, waves and neighbours there are: each output is
one sum in one order (native/tiles.h). So exactness R holds, and equal rows give equal bits in
every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from expert_pool.kernels.library import NativeCall, NativeKernels, NativeLayer
from expert_pool.slots import SlotArena
from expert_pool.tables import IntArray

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import ParamSpec
    from expert_pool.grouped_linear import ExpertGroup

_ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.silu,
    lambda x: functional.gelu(x, approximate="tanh"),
    functional.gelu,
    functional.relu,
    lambda x: functional.relu(x).square(),
)
"""In the order of `enum Activation` of native/experts.h."""


def unsupported(module: Any, params: Sequence[ParamSpec]) -> str | None:
    """Why a layer with the experts module `module` cannot be computed natively; None if it can."""
    if {param.dtype for param in params} != {"bfloat16"}:
        return "its experts are not in bfloat16"
    if module.is_transposed:
        return "its weights are stored transposed"
    if module.has_post_expert_norm:
        return "it normalises each expert's output"
    if activation_of(module) is None:
        return "its activation is not one of SiLU, GELU, ReLU, squared ReLU"
    return None


def activation_of(module: Any) -> int | None:
    """The number of the module's activation, found by what it does; None for any other.

    With a gate: whether its gating is that activation of the first half times the second one.
    """
    probe = torch.linspace(-20, 20, 1001)
    other = torch.linspace(-3, 5, 1001)
    for number, activation in enumerate(_ACTIVATIONS):
        if module.has_gate:
            found = module._apply_gate(torch.cat((probe, other)).unsqueeze(0))
            expected = (activation(probe) * other).unsqueeze(0)
        else:
            found, expected = module.act_fn(probe), activation(probe)
        if found.shape == expected.shape and torch.allclose(found, expected, 1e-5, 1e-5):
            return number
    return None


class LayerKernel:
    """What the kernels have to know of one layer."""

    def __init__(
        self,
        kernels: NativeKernels,
        arena: SlotArena,
        params: Sequence[ParamSpec],
        activation: int,
    ) -> None:
        """`params` are a slot's, bf16 and not transposed; see `unsupported`."""
        self._kernels = kernels
        by_name = {param.name: param for param in params}
        gated = "gate_up_proj" in by_name
        up = "gate_up_proj" if gated else "up_proj"
        hidden, inner = by_name["down_proj"].shape

        def offset(name: str) -> int:
            return by_name[name].slot_offset if name in by_name else -1

        self._inner = inner
        self._arena = arena  # its memory is what the address below points to
        self._layer = NativeLayer(
            hidden=hidden,
            inner=inner,
            gated=int(gated),
            activation=activation,
            arena=arena.slot(0).data_ptr(),
            slot_bytes=arena.slot_bytes,
            up=offset(up),
            up_bias=offset(f"{up}_bias"),
            down=offset("down_proj"),
            down_bias=offset("down_proj_bias"),
        )

    def apply(
        self,
        group: ExpertGroup,
        hidden: torch.Tensor,
        pairs: IntArray,
        top_k: int,
        by_pair: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows of `hidden` `[T, H]`, not yet weighted, through the experts that chose them.

        `pairs` are the group's (row * top_k + choice), one expert after another. They come out in
        the same order, `[S, H]`, or at their places in `by_pair`, `[T * K, H]`.
        """
        hidden = hidden.contiguous()
        pairs = np.ascontiguousarray(pairs, dtype=np.int64)
        slots = np.ascontiguousarray(group.slots, dtype=np.int64)
        counts = np.ascontiguousarray(group.counts, dtype=np.int64)
        scratch = hidden.new_empty((pairs.size, self._inner))
        out = by_pair
        if out is None:
            out = hidden.new_empty((pairs.size, hidden.shape[-1]))
        self._kernels.experts(
            self._layer,
            NativeCall(
                rows=hidden.data_ptr(),
                pairs=pairs.ctypes.data,
                slots=slots.ctypes.data,
                counts=counts.ctypes.data,
                experts=slots.size,
                top_k=top_k,
                placed=by_pair is not None,
                scratch=scratch.data_ptr(),
                out=out.data_ptr(),
                threads=torch.get_num_threads(),
            ),
        )
        return out

    def combine(self, by_pair: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[T * K, H]` and the router's weights `[T, K]` to their weighted sums `[T, H]`."""
        return self._kernels.combine(by_pair, weights)


class NativeRows:
    """The rows of one forward call, computed group after group, then combined."""

    def __init__(self, kernel: LayerKernel, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        self._kernel = kernel
        self._hidden = hidden
        self._weights = weights
        self._by_pair = hidden.new_empty((weights.numel(), hidden.shape[-1]))
        self._computed: list[IntArray] = []

    def add(self, group: ExpertGroup, pairs: IntArray) -> None:
        """Computes a group's experts for `pairs`, which are in its order."""
        top_k = self._weights.shape[-1]
        self._kernel.apply(group, self._hidden, pairs, top_k, self._by_pair)
        self._computed.append(pairs)

    def combine(self) -> torch.Tensor:
        """`[T, H]`; pairs that none computed count as zeros."""
        if sum(pairs.size for pairs in self._computed) < self._weights.numel():
            left = np.ones(self._weights.numel(), dtype=np.bool_)
            for pairs in self._computed:
                left[pairs] = False
            self._by_pair[torch.from_numpy(left)] = 0
        return self._kernel.combine(self._by_pair, self._weights)
