"""Slots go where they save reads: per-layer quotas, moved by measured marginal gain.

For each layer two shadow counters run beside the cache. One counts demands for the expert that a
cache with one slot more would still have; the other, demands for the resident that a cache with one
slot less would not have. Counts of demands and nothing else: the same log, the same moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import numpy as np

from expert_pool.policies import Policy
from expert_pool.tables import IntArray

REVIEW_STEPS: Final = 64
"""Steps between reviews."""
_LAYERS_A_MOVE: Final = 8
"""A review moves at most one slot for so many layers."""
_MARGIN: Final = 1.5
"""A slot moves where it gains so many times what it costs, and more by _SIGMAS of chance."""
_SIGMAS: Final = 3.0
_KEPT: Final = 0.75
"""Of the counts, from one review to the next."""
_NOBODY: Final = -1


class QuotaKeeper:
    """Counts what one slot more or less would have done to each layer, and proposes moves."""

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[Hashable],
        floors: Sequence[int],
        ceilings: Sequence[int],
    ) -> None:
        """By layer: its group, within which slots can move, and bounds of its quota."""
        self.gains = np.zeros(len(groups))
        """Misses that one slot more would have saved, by layer, lately."""
        self.losses = np.zeros(len(groups))
        """Hits that one slot less would have cost."""
        self._policy = policy
        self._groups = tuple(groups)
        self._floors = tuple(floors)
        self._ceilings = tuple(ceilings)
        self._ghosts = [_NOBODY] * len(groups)
        self._edges = [_NOBODY] * len(groups)
        self._widest = np.zeros(len(groups))
        """Experts that one step lately asked of a layer."""
        self._uses = [np.zeros(number, np.float32) for number in ceilings]
        """By layer and expert: steps that lately asked for it of a layer with a slot for each."""
        self._steps = 0

    def demanded(
        self,
        layer: int,
        experts: IntArray,
        missing: IntArray,
        room: int,
        others: Callable[[], IntArray],
    ) -> None:
        """After `Policy.touch`: a layer is asked for `experts`, of which `missing` are not there.

        `room` is the layer's slots but for those of idle hot experts; `others()` are the residents
        that it does not need and that may leave, ascending.
        """
        self._widest[layer] = max(self._widest[layer], experts.size)
        if missing.size and self._ghosts[layer] in missing:
            self.gains[layer] += 1.0
            self._ghosts[layer] = _NOBODY
        edge = self._edges[layer]
        if edge != _NOBODY and edge in experts:
            self.losses[layer] += 1.0
            self._edges[layer] = edge = _NOBODY
        if edge == _NOBODY and not missing.size:
            # With room for all that have come, a slot less would cost nothing.
            idle = others()
            if experts.size + idle.size >= room:
                self._set_edge(layer, idle)

    def demanded_of_whole(self, layer: int, experts: IntArray) -> None:
        """A layer with a slot for every expert is asked for `experts`."""
        self._widest[layer] = max(self._widest[layer], experts.size)
        self._uses[layer][experts] += 1.0

    def evicted(self, layer: int, victims: IntArray, others: IntArray) -> None:
        """`victims` leave, first one first; `others` stay and are not needed by this step."""
        last, ghost = int(victims[-1]), self._ghosts[layer]
        if ghost not in (_NOBODY, last):
            pair = np.array(sorted((ghost, last)), dtype=np.int64)
            leaves = int(self._policy.victims(layer, pair, 1)[0])
            last = ghost if leaves == last else last
        self._ghosts[layer] = last
        self._set_edge(layer, others)

    def review(self, quotas: Sequence[int]) -> list[tuple[int, int]]:
        """At the end of a step: slots to move, as (from layer, to layer)."""
        self._steps += 1
        if self._steps % REVIEW_STEPS:
            return []
        for layer, uses in enumerate(self._uses):
            if quotas[layer] == self._ceilings[layer]:
                # No shadow counter runs there; the least used expert would be missed each time.
                self.losses[layer] = uses.min()
        moves: list[tuple[int, int]] = []
        most = max(1, len(self._groups) // _LAYERS_A_MOVE)
        takers = np.argsort(-self.gains, kind="stable").tolist()
        givers = np.argsort(self.losses, kind="stable").tolist()
        moved: set[int] = set()
        for target in takers:
            if len(moves) == most:
                break
            if target in moved or quotas[target] >= self._ceilings[target]:
                continue
            for source in givers:
                if source in moved or source == target or not self._can_give(source, quotas):
                    continue
                if self._groups[source] == self._groups[target]:
                    if self._pays(self.gains[target], self.losses[source]):
                        moves.append((source, target))
                        moved |= {source, target}
                        for layer in (source, target):
                            self._ghosts[layer] = self._edges[layer] = _NOBODY
                    break
        for counts in (self.gains, self.losses, self._widest):
            counts *= _KEPT
        for uses in self._uses:
            uses *= _KEPT
        return moves

    def _pays(self, gain: float, loss: float) -> bool:
        # Both are counts of rare events: their difference scatters by the root of their sum.
        return gain > _MARGIN * loss + _SIGMAS * math.sqrt(gain + loss)

    def _can_give(self, layer: int, quotas: Sequence[int]) -> bool:
        # A layer that is asked for more than its slots at once would read experts again and again.
        return quotas[layer] - 1 >= max(self._floors[layer], self._widest[layer])

    def _set_edge(self, layer: int, others: IntArray) -> None:
        chosen = self._policy.victims(layer, others, 1)
        self._edges[layer] = int(chosen[0]) if chosen.size else _NOBODY
