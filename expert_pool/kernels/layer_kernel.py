"""One MoE layer in the native kernels: which layers they can compute, and how a call goes.

An expert's rows come out the same whatever slots, waves and neighbours there are: each output is
one sum in one order (native/tiles.h). So exactness R holds, and equal rows give equal bits in
every batch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expert_pool.kernels.activation import Activation
from expert_pool.kernels.library import NativeCall, NativeKernels, NativeLayer
from expert_pool.slots import SlotArena
from expert_pool.tables import IntArray

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import ParamSpec
    from expert_pool.grouped_linear import ExpertGroup


def unsupported(
    module: Any, params: Sequence[ParamSpec], activation: Activation | None
) -> str | None:
    """Why experts of `module`, with that activation, cannot be computed; None if they can."""
    if {param.dtype for param in params} != {"bfloat16"}:
        return "its experts are not in bfloat16"
    if module.has_post_expert_norm:
        return "it normalises each expert's output"
    if activation is None:
        return "its activation is not one of SiLU, GELU, ReLU, squared ReLU, clamped SwiGLU"
    shapes = {param.name: param.shape for param in params}
    up, down = shapes.get(up_name(shapes)), shapes.get("down_proj")
    if bool(module.has_gate) != ("gate_up_proj" in shapes) or up is None or down is None:
        return f"its parameters are {', '.join(sorted(shapes))}"
    if module.is_transposed:
        up, down = up[::-1], down[::-1]
    if len(down) != 2 or up != ((1 + bool(module.has_gate)) * down[1], down[0]):
        return f"its projections are {up} and {down}"
    return None


def up_name(names: Container[str]) -> str:
    """What the first projection is called."""
    return "gate_up_proj" if "gate_up_proj" in names else "up_proj"


class LayerKernel:
    """What the kernels have to know of one layer."""

    def __init__(
        self,
        kernels: NativeKernels,
        arena: SlotArena,
        params: Sequence[ParamSpec],
        activation: Activation,
        is_transposed: bool = False,
    ) -> None:
        """`params` are a slot's, `[in, out]` if transposed, else `[out, in]`; see `unsupported`."""
        self._kernels = kernels
        by_name = {param.name: param for param in params}
        up = up_name(by_name)
        hidden, inner = by_name["down_proj"].shape
        if is_transposed:
            hidden, inner = inner, hidden

        def offset(name: str) -> int:
            return by_name[name].slot_offset if name in by_name else -1

        self._hidden, self._inner = hidden, inner
        self._arena = arena  # its memory is what the address below points to
        self._layer = NativeLayer(
            hidden=hidden,
            inner=inner,
            gated=int(up == "gate_up_proj"),
            activation=activation.number,
            transposed=int(is_transposed),
            interleaved=int(activation.is_interleaved),
            alpha=activation.alpha,
            limit=activation.limit,
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
        the same order, `[S, H]`, or at their places in `by_pair`, `[T * K, H]`. Raises ValueError
        where the numbers of rows and pairs do not fit: the kernels believe them.
        """
        hidden = hidden.contiguous()
        pairs = np.ascontiguousarray(pairs, dtype=np.int64)
        slots = np.ascontiguousarray(group.slots, dtype=np.int64)
        counts = np.ascontiguousarray(group.counts, dtype=np.int64)
        self._check(group, hidden, pairs, top_k, by_pair)
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

    def _check(
        self,
        group: ExpertGroup,
        hidden: torch.Tensor,
        pairs: IntArray,
        top_k: int,
        by_pair: torch.Tensor | None,
    ) -> None:
        room = hidden.shape[0] * top_k
        good = (
            group.arena is self._arena
            and hidden.shape[1:] == (self._hidden,)
            and hidden.dtype == torch.bfloat16
            and int(group.counts.sum()) == pairs.size
            and (not pairs.size or (pairs.min() >= 0 and pairs.max() < room))
            and (
                not group.slots.size
                or (group.slots.min() >= 0 and group.slots.max() < self._arena.capacity)
            )
            and (
                by_pair is None
                or (by_pair.shape == (room, self._hidden) and by_pair.is_contiguous())
            )
        )
        if not good:
            raise ValueError(
                f"expected bf16 rows of {self._hidden} values, their pairs and slots of this "
                f"layer, found {list(hidden.shape)} {hidden.dtype}, {pairs.size} pairs for "
                f"{group.counts.sum()} rows, slots {group.slots.tolist()}"
            )

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
