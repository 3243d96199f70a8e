"""What a router chose for the rows of one forward call, sorted by expert."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from expert_pool.tables import IntArray


@dataclass(slots=True)
class Routing:
    """Pairs (row, choice) of `[T, K]`, numbered row * K + choice."""

    order: IntArray
    """Pair numbers sorted by expert; pairs out of range left out."""
    counts: IntArray
    """Pairs of each expert, [E]."""
    ends: IntArray
    """Where in `order` each expert's pairs end, [E]."""
    bad_rows: IntArray
    """Rows with a weight that is not finite or an index outside 0..E-1, ascending."""

    def pairs_of(self, expert: int) -> IntArray:
        """The pairs that chose an expert."""
        end = self.ends[expert]
        return self.order[end - self.counts[expert] : end]

    def weights_of(self, top_k_weights: torch.Tensor) -> npt.NDArray[np.float64]:
        """Sum of the router's weights that each expert got, [E]; bad ones count as 0."""
        flat = top_k_weights.detach().reshape(-1).float().cpu().numpy()[self.order]
        experts = np.repeat(np.arange(self.counts.size), self.counts)
        sums = np.bincount(experts, weights=flat, minlength=self.counts.size)
        return np.nan_to_num(sums, nan=0.0, posinf=0.0, neginf=0.0)


_NOTHING = np.zeros(0, dtype=np.int64)


def sort_by_expert(
    top_k_index: torch.Tensor, top_k_weights: torch.Tensor, num_experts: int
) -> Routing:
    """Sorts the router's choice `[T, K]` and finds rows that cannot be served.

    A bad row's valid pairs stay in, so that its neighbours' experts see the same number of rows
    as if it were good.
    """
    # Stock's own sort: it is not stable, and the order of an expert's rows can show in last bits.
    chosen, order = _sort(top_k_index)
    bad: npt.NDArray[np.bool_] | None = None
    if chosen[0] < 0 or chosen[-1] >= num_experts:
        outside = (top_k_index < 0) | (top_k_index >= num_experts)
        bad = outside.any(dim=1).cpu().numpy()
        chosen, order = _sort(top_k_index.masked_fill(outside, num_experts))
    # One sum is not finite if any weight is not.
    if not math.isfinite(top_k_weights.sum().item()):
        wild: npt.NDArray[np.bool_] = (~torch.isfinite(top_k_weights)).any(dim=1).cpu().numpy()
        bad = wild if bad is None else np.logical_or(bad, wild)
    counts = np.bincount(chosen, minlength=num_experts)[:num_experts]
    ends = counts.cumsum()
    return Routing(
        order=order[: ends[-1]],
        counts=counts,
        ends=ends,
        bad_rows=_NOTHING if bad is None else np.flatnonzero(bad),
    )


def _sort(top_k_index: torch.Tensor) -> tuple[IntArray, IntArray]:
    chosen, order = torch.sort(top_k_index.reshape(-1))
    return chosen.cpu().numpy(), order.cpu().numpy()
