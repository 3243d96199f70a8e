"""A pool without bytes: the decisions of a live pool, again, from a log of what was asked of it.

Asks the same rules in the same order as `Keeper`, `LayerPass` and `Residency` do, with reads that
come at once. `tests/expert_pool/test_replay_is_live.py` holds it against a live pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from expert_pool.crowd import crowded_order
from expert_pool.eviction_rules import EvictionRules
from expert_pool.quotas import QuotaKeeper
from expert_pool.tables import IntArray


class SimulatedPool:
    """Who is resident, by layer; prefetch, preloads and failed reads are left out."""

    def __init__(
        self,
        num_experts: Sequence[int],
        top_k: Sequence[int],
        quotas: Sequence[int],
        rules: EvictionRules,
        move_quotas: bool = True,
        hot_set: Mapping[int, IntArray] | None = None,
    ) -> None:
        """All layers have slots of one shape."""
        self.quotas = list(quotas)
        self.misses = 0
        self._rules = rules
        self._hot = dict(hot_set or {})
        self._experts = tuple(num_experts)
        self._resident: npt.NDArray[np.bool_] = np.zeros((len(quotas), max(num_experts)), np.bool_)
        self._keeper: QuotaKeeper | None = None
        if move_quotas:
            nobody: IntArray = np.zeros(0, np.int64)
            floors = [k + self._hot.get(at, nobody).size for at, k in enumerate(top_k)]
            self._keeper = QuotaKeeper(rules, [0] * len(quotas), floors, num_experts)

    @property
    def resident(self) -> npt.NDArray[np.bool_]:
        """Who has a slot now, [layers, experts]. Not to be written."""
        return self._resident

    def demand(
        self,
        layer: int,
        experts: IntArray,
        counts: IntArray,
        tokens: int,
        weights: npt.NDArray[np.floating] | None = None,
    ) -> list[int]:
        """A layer is asked for `experts`, ascending. Returns who leaves, in order."""
        resident, quota = self._resident[layer], self.quotas[layer]
        here = resident[experts]
        hits, missing = experts[here], experts[~here]
        self.misses += missing.size
        if quota == self._experts[layer]:
            resident[experts] = True
            if self._keeper is not None:
                self._keeper.demanded_of_whole(layer, experts)
            return []
        self._rules.touch(layer, experts, counts, tokens, weights)
        if missing.size:
            self._rules.missed(layer, missing)
        room = self._room_for(layer, experts)
        if self._keeper is not None and experts.size <= room:
            self._keeper.demanded(layer, experts, missing, room, lambda: self._idle(layer, experts))
        if not missing.size:
            return []
        wanted = missing.size - (quota - int(np.count_nonzero(resident)))
        if experts.size > room:
            idle = self._idle(layer, experts)
            hot = self._hot.get(layer)
            _, order = crowded_order(self._rules, layer, hits, missing, idle, room, hot)
            victims = order[: max(wanted, 0)]
        else:
            candidates = self._idle(layer, hits)
            victims = self._rules.victims(layer, candidates, wanted)
            if self._keeper is not None and victims.size:
                self._keeper.evicted(layer, victims, candidates[~np.isin(candidates, victims)])
        resident[missing] = True
        return self._evict(layer, victims)

    def end_step(self) -> list[tuple[int, int, list[int]]]:
        """Moves slots where that pays: (from layer, to layer, who leaves for it)."""
        if self._keeper is None:
            return []
        moved = []
        for source, target in self._keeper.review(self.quotas):
            full = int(np.count_nonzero(self._resident[source])) == self.quotas[source]
            candidates = self._idle(source, np.zeros(0, np.int64))
            victims = self._rules.victims(source, candidates, int(full))
            self.quotas[source] -= 1
            self.quotas[target] += 1
            moved.append((source, target, self._evict(source, victims)))
        return moved

    def _room_for(self, layer: int, experts: IntArray) -> int:
        room = self.quotas[layer]
        if layer in self._hot:
            held = self._hot[layer][self._resident[layer][self._hot[layer]]]
            room -= int(np.count_nonzero(~np.isin(held, experts)))
        return room

    def _idle(self, layer: int, busy: IntArray) -> IntArray:
        mask = self._resident[layer].copy()
        mask[busy] = False
        if layer in self._hot:
            mask[self._hot[layer]] = False
        return np.flatnonzero(mask)

    def _evict(self, layer: int, victims: IntArray) -> list[int]:
        self._resident[layer][victims] = False
        gone: list[int] = victims.tolist()
        for victim in gone:
            self._rules.evicted(layer, victim)
        return gone
