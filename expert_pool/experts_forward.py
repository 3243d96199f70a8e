"""The experts function: transformers' own grouped_mm arithmetic, over a pool of slots.

Registered in transformers' experts interface as "coterie", it serves every family whose experts
module uses that interface. For one expert: all of its rows in one product. For one token: each
expert's output times its weight in the promoted dtype, restored to [T, K, H], one sum over K in
router order, one cast. So the result is bitwise that of stock grouped_mm, wherever experts lie.
Where native kernels compute (`kernels/choice.py`), steps and order are the same, sums are not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from core.errors import CoterieError
from core.model_shape import experts_scratch_bytes
from expert_pool.grouped_linear import ExpertGroup
from expert_pool.kernels.choice import kernel_for
from expert_pool.kernels.layer_kernel import NativeRows
from expert_pool.layer_major import is_layer_major, pause
from expert_pool.routing import Routing, sort_by_expert
from expert_pool.tables import IntArray

if TYPE_CHECKING:
    from expert_pool.pool import ExpertPool

IMPLEMENTATION = "coterie"


def register() -> None:
    """Make `experts_implementation="coterie"` known to transformers. May be called twice."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


@torch.no_grad()
def experts_forward(
    module: torch.nn.Module,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """`[T, H]`, router's choice `[T, K]` and its weights `[T, K]` to the experts' output `[T, H]`.

    Rows that cannot be served are reported to the pool and come out as zeros (bad routing) or
    without the experts that could not be read; other rows are as they would be without them.
    Inputs whose intermediate results exceed the pool's scratch budget pass in equal row chunks;
    their number depends on T alone, so the answer never depends on where experts lie.
    """
    attached = getattr(module, "_coterie", None)
    if attached is None:
        raise CoterieError(
            "expected experts attached to a pool: call ExpertPool.attach(model) before the model"
        )
    pool, layer = attached
    num_rows = hidden.shape[0]
    if num_rows == 0:
        return torch.zeros_like(hidden)
    if pool.observer is not None:
        pool.observer(layer, top_k_index)
    if is_layer_major():
        pause(within_layer=False)
        return _forward_in_order(module, pool, layer, hidden, top_k_index, top_k_weights)
    chunks = -(-num_rows // rows_a_chunk(pool, layer, hidden, top_k_index, top_k_weights))
    if chunks == 1:
        return _forward_chunk(module, pool, layer, hidden, top_k_index, top_k_weights, 0)
    out = torch.empty_like(hidden)
    bounds = [num_rows * at // chunks for at in range(chunks + 1)]
    for start, stop in pairwise(bounds):
        out[start:stop] = _forward_chunk(
            module,
            pool,
            layer,
            hidden[start:stop],
            top_k_index[start:stop],
            top_k_weights[start:stop],
            start,
        )
    return out


def rows_a_chunk(
    pool: ExpertPool,
    layer: int,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> int:
    """How many rows may pass a layer at once within the pool's scratch budget; at least one."""
    return max(1, _pairs_a_chunk(pool, layer, hidden, top_k_weights) // top_k_index.shape[-1])


def _pairs_a_chunk(
    pool: ExpertPool, layer: int, hidden: torch.Tensor, top_k_weights: torch.Tensor
) -> int:
    hidden_size = hidden.shape[-1]
    up_values, down_values = pool.projection_values[layer]
    per_pair = experts_scratch_bytes(
        hidden_size=hidden_size,
        up_width=up_values // hidden_size,
        intermediate_size=down_values // hidden_size,
        dtype_bytes=hidden.element_size(),
        weighted_bytes=torch.promote_types(hidden.dtype, top_k_weights.dtype).itemsize,
    )
    return max(1, pool.settings.scratch_bytes // per_pair)


def _forward_in_order(
    module: Any,
    pool: ExpertPool,
    layer: int,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """`[T, H]` of all rows, one expert after another; sums grow in float32.

    An expert's rows are cut where they exceed the scratch budget, by their number alone.
    """
    top_k = top_k_index.shape[-1]
    routing = sort_by_expert(top_k_index, top_k_weights, pool.index.layers[layer].num_experts)
    weights = top_k_weights.reshape(-1)
    most = _pairs_a_chunk(pool, layer, hidden, top_k_weights)
    sums = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    experts_pass = pool.demand(
        layer,
        routing.counts,
        hidden.shape[0],
        in_order=True,
        rows=lambda: routing.order // top_k,
    )
    experts = iter(experts_pass)
    try:
        for expert in experts:
            pairs = routing.pairs_of(int(expert[0]))
            chunks = -(-pairs.size // most)
            for some in np.array_split(pairs, chunks):
                group = _one_expert(pool, layer, expert, some.size, hidden.device)
                rows = _on(hidden.device, some // top_k)
                kernel = kernel_for(module, hidden, some.size, 1)
                if kernel is None:
                    out = apply_with_torch(module, group, hidden.index_select(0, rows))
                else:
                    out = kernel.apply(group, hidden, some, top_k)
                out = out * weights.index_select(0, _on(hidden.device, some)).unsqueeze(-1)
                out = out.to(sums.dtype)
                # Many times as fast as index_add_ on a CPU.
                sums.scatter_add_(0, rows.unsqueeze(-1).expand_as(out), out)
    finally:
        experts.close()
    _report(pool, routing, experts_pass.failed, top_k, 0)
    result = sums.to(hidden.dtype)
    if routing.bad_rows.size:
        result[_on(result.device, routing.bad_rows)] = 0
    return result


def _one_expert(
    pool: ExpertPool, layer: int, expert: IntArray, rows: int, device: torch.device
) -> ExpertGroup:
    residency = pool.residency
    residency.states.check_pinned(layer, expert)
    slots = residency.addresses.lookup(layer, expert)
    return ExpertGroup(residency.arena(layer), slots, np.array([rows]), device)


def _forward_chunk(
    module: Any,
    pool: ExpertPool,
    layer: int,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    first_row: int,
) -> torch.Tensor:
    num_rows, top_k = top_k_index.shape
    if pool.read_ahead is not None:
        pool.read_ahead.look(layer, hidden)
    routing = sort_by_expert(top_k_index, top_k_weights, pool.index.layers[layer].num_experts)
    kernel = kernel_for(module, hidden, routing.order.size, int(np.count_nonzero(routing.counts)))
    if kernel is None:
        rows: _TorchRows | NativeRows = _TorchRows(module, hidden, top_k_weights)
    else:
        rows = NativeRows(kernel, hidden, top_k_weights)
    experts_pass = pool.demand(
        layer,
        routing.counts,
        num_rows,
        weights=lambda: routing.weights_of(top_k_weights),
        rows=lambda: routing.order // top_k + first_row,
    )
    groups = iter(experts_pass)
    try:
        for experts in groups:
            if experts.size == 0:
                continue
            rows.add(*_make_group(pool, layer, routing, experts, hidden.device))
    finally:
        groups.close()
    _report(pool, routing, experts_pass.failed, top_k, first_row)
    out = rows.combine()
    if routing.bad_rows.size:
        out[_on(out.device, routing.bad_rows)] = 0
    return out


class _TorchRows:
    """The rows of one forward call, computed group after group, then combined."""

    def __init__(self, module: Any, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        self._module = module
        self._hidden = hidden
        self._weights = weights
        self._weighted: list[torch.Tensor] = []
        self._computed: list[IntArray] = []

    def add(self, group: ExpertGroup, pairs: IntArray) -> None:
        """Computes a group's experts for `pairs`, which are in its order."""
        device = self._hidden.device
        rows = self._hidden.index_select(0, _on(device, pairs // self._weights.shape[-1]))
        weight = self._weights.reshape(-1).index_select(0, _on(device, pairs))
        out = apply_with_torch(self._module, group, rows)
        self._weighted.append(out * weight.unsqueeze(-1))
        self._computed.append(pairs)

    def combine(self) -> torch.Tensor:
        """`[T, H]`; pairs that none computed count as zeros."""
        if not self._weighted:
            return torch.zeros_like(self._hidden)
        by_pair = _by_pair(self._weighted, self._computed, self._weights.numel())
        return _combine(by_pair, self._hidden.shape[0], self._hidden.dtype)


def _by_pair(
    weighted: list[torch.Tensor], computed: list[IntArray], num_pairs: int
) -> torch.Tensor:
    """Rows of all groups in the order of their pairs, `[T * K, H]`; zeros where none computed."""
    order = computed[0] if len(computed) == 1 else np.concatenate(computed)
    together = weighted[0] if len(weighted) == 1 else torch.cat(weighted)
    weighted.clear()
    place = np.full(num_pairs, -1, dtype=np.int64)
    place[order] = np.arange(order.size)
    if order.size == num_pairs:
        return together.index_select(0, _on(together.device, place))
    by_pair = together.index_select(0, _on(together.device, np.maximum(place, 0)))
    by_pair[_on(by_pair.device, np.flatnonzero(place < 0))] = 0
    return by_pair


def _on(device: torch.device, numbers: IntArray) -> torch.Tensor:
    return torch.from_numpy(numbers).to(device)


def _combine(by_pair: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """One sum over K in router order, one cast: `[T * K, H]` to `[T, H]`."""
    return by_pair.view(num_rows, -1, by_pair.shape[-1]).sum(dim=1).to(dtype)


def _make_group(
    pool: ExpertPool, layer: int, routing: Routing, experts: IntArray, device: torch.device
) -> tuple[ExpertGroup, IntArray]:
    """Pinned experts in slot order, and the pairs that they compute in the same order."""
    residency = pool.residency
    residency.states.check_pinned(layer, experts)
    slots = residency.addresses.lookup(layer, experts)
    # A layer may have become whole while only the last of its experts were awaited.
    some = experts.size < np.count_nonzero(routing.counts)
    if some or residency.ordered_from(layer) is None:
        by_slot = np.argsort(slots)
        experts, slots = experts[by_slot], slots[by_slot]
        pairs = np.concatenate([routing.pairs_of(e) for e in experts.tolist()])
    else:
        pairs = routing.order
    group = ExpertGroup(residency.arena(layer), slots, routing.counts[experts], device)
    return group, pairs


def apply_with_torch(module: Any, group: ExpertGroup, rows: torch.Tensor) -> torch.Tensor:
    """Each row through its expert, not yet weighted: `[S, H]` to `[S, H]`."""
    transposed = bool(module.is_transposed)
    up = group.linear(rows, "gate_up_proj" if module.has_gate else "up_proj", transposed)
    inner = group.activate(module._apply_gate if module.has_gate else module.act_fn, up)
    out = group.linear(inner, "down_proj", transposed)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return out


def _report(
    pool: ExpertPool, routing: Routing, failed: list[int], top_k: int, first_row: int
) -> None:
    if routing.bad_rows.size:
        pool.report_bad_rows((routing.bad_rows + first_row).tolist())
    for expert in failed:
        pool.report_failed_rows((routing.pairs_of(expert) // top_k + first_row).tolist())
