"""What a rank says of its pool to whoever chooses a replica."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from core.step import RoutingSummary
from expert_pool.domain_popularity import DomainPopularity, FloatArray
from expert_pool.tables import State, StateTable

_SUMS_KEPT: Final = 0.98
"""With each step that missed anything."""
_MOST_DOMAINS: Final = 32
"""Those used last are told of."""


class MissCost:
    """Measured seconds that a missing expert adds to a step, smoothed."""

    def __init__(self) -> None:
        self._misses = 0.0
        self._stall_s = 0.0

    def add(self, misses: int, stall_s: float) -> None:
        """A step missed so many experts and waited so long for reads."""
        if misses:
            self._misses = self._misses * _SUMS_KEPT + misses
            self._stall_s = self._stall_s * _SUMS_KEPT + stall_s

    @property
    def seconds(self) -> float:
        """0 before the first miss."""
        return self._stall_s / self._misses if self._misses else 0.0


def routing_summary(
    states: StateTable,
    popularity: DomainPopularity,
    top_k: npt.NDArray[np.floating],
    miss_s: float,
) -> RoutingSummary:
    """Expected hit rates now: the share of a token's experts that are here or on their way.

    `top_k` by layer. Where nothing is known of what tokens use, they use all experts alike.
    """
    coming = (states.state == State.RESIDENT) | (states.state == State.LOADING)
    here: FloatArray = coming.astype(np.float32)

    def hit_rate(rates: FloatArray | None) -> float:
        if rates is None or not rates.any():
            return float(here.sum()) / sum(states.experts_per_layer)
        by_layer = np.einsum("le,le->l", rates, here)
        of_layer = np.maximum(rates.sum(axis=1), 1e-9)
        return float(np.average(by_layer / of_layer, weights=top_k))

    return RoutingSummary(
        hit_rate=hit_rate(popularity.of_everyone()),
        hit_rate_by_domain={
            name: hit_rate(popularity.of_domain(name))
            for name in popularity.domains[-_MOST_DOMAINS:]
        },
        miss_s=miss_s,
    )
