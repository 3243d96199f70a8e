"""Belady's optimum: the fewest misses that any eviction rule could have had, known afterwards.

A step demands a set of experts that must be resident together. Each is admitted: no bypass. When
there is no room, the residents outside the set whose next use lies furthest away leave (L. A.
Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2),
1966). The exchange argument holds for sets as it does for single pages, and
`tests/expert_pool/test_oracle.py` checks it against dynamic programming.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from expert_pool.tables import IntArray

ABSENT: Final = -1
"""Fills a demand row that has fewer experts than the row is wide."""
NEVER: Final = np.iinfo(np.int32).max
"""Next use of an expert that is not demanded again."""


def next_uses(demands: IntArray, num_experts: int) -> npt.NDArray[np.int32]:
    """For each demand the step of the same expert's next demand in its cache, else NEVER.

    `demands` is [steps, caches, width]: distinct experts of 0..num_experts-1, ABSENT beyond.
    """
    steps, caches, _ = demands.shape
    following = np.full((caches, num_experts + 1), NEVER, dtype=np.int32)
    found = np.empty(demands.shape, dtype=np.int32)
    row = np.arange(caches)[:, None]
    for step in range(steps - 1, -1, -1):
        demand = demands[step]  # ABSENT is -1: it reads and writes the spare last column
        found[step] = following[row, demand]
        following[row, demand] = step
    return found


def belady_misses(
    demands: IntArray,
    num_experts: int,
    capacity: int,
    residents: npt.NDArray[np.bool_] | None = None,
    after_step: Callable[[], None] | None = None,
) -> IntArray:
    """Misses of the optimum, by step and cache: [steps, caches].

    `demands` [steps, caches, width] as in `next_uses`; all caches hold `capacity` experts and
    start with `residents` [caches, num_experts], or empty. `after_step` is called after each, to
    pause in. Raises ValueError where one step
    demands more experts than fit, or the residents do.
    """
    steps, caches, _ = demands.shape
    sizes = (demands != ABSENT).sum(axis=2)
    if steps and sizes.max() > capacity:
        raise ValueError(
            f"expected a capacity that holds the experts of one step, found {capacity} for "
            f"{sizes.max()}: Belady's optimum is defined from there on"
        )
    # For residents the step of their next use, else OUT: the furthest leaves, and OUT never does.
    out = -1
    held = np.full((caches, num_experts + 1), out, dtype=np.int64)
    if residents is not None:
        first = _first_uses(demands, num_experts)
        held[:, :num_experts] = np.where(residents, first, out)
        if (residents.sum(axis=1) > capacity).any():
            raise ValueError(f"expected at most {capacity} residents at the start, found more")
    size = (held != out).sum(axis=1)
    following = next_uses(demands, num_experts)
    misses = np.zeros((steps, caches), dtype=np.int64)
    row = np.arange(caches)[:, None]
    for step in range(steps):
        demand = demands[step]
        missed = ((held[row, demand] == out) & (demand != ABSENT)).sum(axis=1)
        misses[step] = missed
        size += missed
        held[row, demand] = out  # what the step needs cannot leave
        over = np.flatnonzero(size > capacity)
        while over.size:
            held[over, held[over].argmax(axis=1)] = out
            size[over] -= 1
            over = over[size[over] > capacity]
        held[row, demand] = following[step]
        held[:, num_experts] = out
        if after_step is not None:
            after_step()
    return misses


def _first_uses(demands: IntArray, num_experts: int) -> npt.NDArray[np.int64]:
    steps, caches, _ = demands.shape
    first = np.full((caches, num_experts + 1), int(NEVER), dtype=np.int64)
    row = np.arange(caches)[:, None]
    for step in range(steps - 1, -1, -1):
        first[row, demands[step]] = step
    return first[:, :num_experts]


def as_one_cache(demands: IntArray, num_experts: int) -> IntArray:
    """The demands of all layers on one shared cache of layers x num_experts experts.

    [steps, layers, width] becomes [steps x layers, 1, width], in the order in which the layers of
    a step ask; expert e of layer l is number l x num_experts + e.
    """
    steps, layers, width = demands.shape
    numbers = demands + np.arange(layers)[:, None] * num_experts
    numbers = np.where(demands == ABSENT, ABSENT, numbers)
    return numbers.reshape(steps * layers, 1, width)


@dataclass(frozen=True, slots=True)
class Window:
    """What one layer was asked for over some steps, and what its live cache missed."""

    layer: int
    capacity: int
    num_experts: int
    residents: IntArray
    demands: tuple[IntArray, ...]
    misses: int

    def optimum(self, after_step: Callable[[], None] | None = None) -> int:
        """Misses of the optimum from the same residents; the work is done here, off the step.

        `after_step` is called after each of the window's steps, to pause in.
        """
        width = max((demand.size for demand in self.demands), default=0)
        padded = np.full((len(self.demands), 1, width), ABSENT, dtype=np.int64)
        for step, demand in enumerate(self.demands):
            padded[step, 0, : demand.size] = demand
        held = np.zeros((1, self.num_experts), dtype=np.bool_)
        held[0, self.residents] = True
        misses = belady_misses(padded, self.num_experts, self.capacity, held, after_step)
        return int(misses.sum())


class ShadowWindow:
    """Keeps what one sampled layer is asked for until a window is full; then hands it out.

    The optimum needs the future, so regret comes one window late. A step that demands more than
    the capacity runs in waves, for which there is no optimum: it ends the window early.
    """

    def __init__(self, layer: int, num_experts: int, window_steps: int) -> None:
        if window_steps < 1:
            raise ValueError(f"expected a window of at least one step, found {window_steps}")
        self.layer = layer
        self.num_experts = num_experts
        self.window_steps = window_steps
        self._residents: IntArray | None = None
        self._capacity = 0
        self._demands: list[IntArray] = []
        self._misses = 0

    def record(
        self, residents: IntArray, capacity: int, experts: IntArray, misses: int
    ) -> Window | None:
        """Note one step: `residents` as they were before it. A full window, when there is one.

        A moved quota ends the window too, since the optimum has one capacity.
        """
        ended = None
        if self._residents is not None and capacity != self._capacity:
            ended = self._close()
        if experts.size > capacity:
            return ended or self._close()
        if self._residents is None:
            self._residents, self._capacity = residents.copy(), capacity
        self._demands.append(experts.copy())
        self._misses += misses
        if ended is None and len(self._demands) >= self.window_steps:
            ended = self._close()
        return ended

    def _close(self) -> Window | None:
        if self._residents is None:
            return None
        window = Window(
            self.layer,
            self._capacity,
            self.num_experts,
            self._residents,
            tuple(self._demands),
            self._misses,
        )
        self._residents, self._demands, self._misses = None, [], 0
        return window
