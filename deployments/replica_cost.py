"""What a replica's steps cost, learned from the steps as they come.

A step's time is taken for a sum: so much for the step, so much for each sequence that decodes,
each prompt token, and each expert that had no slot. The four are those that fit the last steps
best (weighted least squares with forgetting over normal equations of four unknowns, none below
0). Errors count relative to a step's length: few long steps do not outweigh many short ones, and a
step that took an age for some other reason hardly counts.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from core.step import StepStats

_KEEP = 0.995
"""Weight of a step beside the next one: the last few hundred steps count."""
_FIRST_STEPS = 4
"""Steps after a start that are not learned from: kernels and caches warm up in them."""
_STEPS_KNOWN = 32
_SOLVE_EVERY = 16
"""Steps between two solutions; one takes longer than all else here."""
_SIZE = 4


class ReplicaCost:
    """Learns from `StepStats`. Everything is 0 until a few steps have been seen."""

    def __init__(self) -> None:
        self._normal: NDArray[np.float64] = np.zeros((_SIZE, _SIZE))
        self._target: NDArray[np.float64] = np.zeros(_SIZE)
        self._solution: NDArray[np.float64] | None = None
        self._solved_at = 0
        self._steps = 0
        self._demand = 0.0
        self._hits = 0.0
        self._decoded = 0.0

    def learn(self, stats: StepStats) -> None:
        """One step."""
        self._steps += 1
        if self._steps <= _FIRST_STEPS or not stats.step_s > 0:
            return
        pool = stats.pool
        row = np.array(
            [1.0, stats.decode_tokens, stats.prefill_tokens, pool.demand_misses], dtype=np.float64
        )
        expected_s = 0.0 if self._known is None else float(row @ self._known)
        weight = 1.0 / max(expected_s, stats.step_s) ** 2
        self._normal = _KEEP * self._normal + weight * np.outer(row, row)
        self._target = _KEEP * self._target + weight * stats.step_s * row
        if stats.decode_tokens and not stats.prefill_tokens:
            demand = pool.demand_hits + pool.demand_misses
            self._demand = _KEEP * self._demand + demand
            self._hits = _KEEP * self._hits + pool.demand_hits
            self._decoded = _KEEP * self._decoded + stats.decode_tokens

    @property
    def step_s(self) -> float:
        """Seconds of a decode step before its sequences."""
        return self._coefficient(0)

    @property
    def sequence_s(self) -> float:
        """Seconds that a sequence adds."""
        return self._coefficient(1)

    @property
    def prefill_token_s(self) -> float:
        """Seconds that a prompt token takes."""
        return self._coefficient(2)

    @property
    def miss_s(self) -> float:
        """Seconds that an expert without a slot adds."""
        return self._coefficient(3)

    @property
    def experts_a_token(self) -> float:
        """Distinct experts that a decode token asks for, at the batch sizes of late."""
        return self._demand / self._decoded if self._decoded else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for of late that had a slot; 1 where none was asked for."""
        return self._hits / self._demand if self._demand else 1.0

    @property
    def _known(self) -> NDArray[np.float64] | None:
        if self._steps < _FIRST_STEPS + _STEPS_KNOWN:
            return None
        if self._solution is None or self._steps >= self._solved_at + _SOLVE_EVERY:
            self._solution = _least_squares(self._normal, self._target)
            self._solved_at = self._steps
        return self._solution

    def _coefficient(self, index: int) -> float:
        known = self._known
        return 0.0 if known is None else float(known[index])


def _least_squares(normal: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-negative solution of the normal equations with the least error.

    With four unknowns all fifteen sets of those that are above 0 can be tried.
    """
    scale = np.sqrt(np.maximum(np.diag(normal), 1e-300))
    scaled = normal / np.outer(scale, scale)
    wanted = target / scale
    best, least = np.zeros(_SIZE), 0.0
    for count in range(1, _SIZE + 1):
        for chosen in combinations(range(_SIZE), count):
            pick = list(chosen)
            # The little on the diagonal decides where the steps seen cannot: evenly.
            part = scaled[np.ix_(pick, pick)] + 1e-9 * np.eye(count)
            found = np.linalg.solve(part, wanted[pick])
            if (found < 0).any():
                continue
            error = float(found @ part @ found - 2.0 * found @ wanted[pick])
            if error < least:
                least = error
                best = np.zeros(_SIZE)
                best[pick] = found
    return best / scale
