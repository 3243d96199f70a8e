"""One pass of one MoE layer over the experts it needs: computed as they come.

Resident experts are handed out at once, while missing ones are read; then those that arrived.
Where experts outnumber slots, slots are reused as soon as their experts have been computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np

from expert_pool.store import DEMAND, Load
from expert_pool.tables import IntArray, ResidencyViolation, State

if TYPE_CHECKING:
    from expert_pool.pool import ExpertPool


class LayerPass:
    """Iterate for groups of pinned experts, ascending; each of `experts` comes once, or failed.

    A group may be read until the next one is asked for. Close the iterator on the way out.
    """

    def __init__(self, pool: ExpertPool, layer: int, experts: IntArray) -> None:
        self.failed: list[int] = []
        """Experts that could not be read; known when the iteration is over."""
        self._pool = pool
        self._layer = layer
        self._experts = experts

    def __iter__(self) -> Generator[IntArray, None, None]:
        states = self._pool.residency.states
        if not states.is_whole(self._layer):
            resident = states.is_resident(self._layer, self._experts)
            if not resident.all():
                yield from self._in_waves(self._experts[resident], self._experts[~resident])
                return
        states.pin(self._layer, self._experts)
        try:
            yield self._experts
        finally:
            states.unpin(self._layer, self._experts)

    def _in_waves(self, hits: IntArray, missing: IntArray) -> Generator[IntArray, None, None]:
        layer, states = self._layer, self._pool.residency.states
        states.pin(layer, hits)
        ready: list[int] = hits.tolist()
        loading: set[int] = set()
        waiting: deque[int] = deque()
        # While experts wait for slots, few are computed at a time, so that slots come free early.
        few = max(1, self._pool.residency.quotas[layer] // 4)
        try:
            for expert in missing.tolist():
                if states.state[layer, expert] == State.LOADING:
                    self._pool.hurry(layer, expert)
                    loading.add(expert)
                else:
                    waiting.append(expert)
            while ready or loading or waiting:
                self._begin_loads(waiting, loading)
                if ready:
                    group = np.array(sorted(ready[:few] if waiting else ready), dtype=np.int64)
                    yield group
                    del ready[: group.size]
                    states.unpin(layer, group)
                    self._collect(False, loading, ready)
                elif loading or waiting:
                    started = time.perf_counter()
                    self._collect(True, loading, ready)
                    self._pool.stats.stall_s += time.perf_counter() - started
        finally:
            # Empty unless the step broke off.
            states.unpin(layer, np.array(ready, dtype=np.int64))

    def _begin_loads(self, waiting: deque[int], loading: set[int]) -> None:
        residency = self._pool.residency
        for expert in [e for e in waiting if residency.is_barred(self._layer, e)]:
            waiting.remove(expert)
            self.failed.append(expert)
        if not waiting:
            return
        admitted = residency.admit(self._layer, list(waiting))
        if len(admitted) < len(waiting) and self._pool.call_off_preloads(self._layer):
            admitted += residency.admit(self._layer, list(waiting)[len(admitted) :])
        for expert, slot in admitted:
            waiting.popleft()
            loading.add(expert)
            self._pool.submit(self._layer, expert, slot, DEMAND)

    def _collect(self, wait: bool, loading: set[int], ready: list[int]) -> None:
        """Take finished loads in; with `wait`, at least one, of this layer or not."""
        loads = self._pool.collect(wait)
        if wait and not loads:
            raise ResidencyViolation(
                f"layer {self._layer}: experts {sorted(loading)} are awaited and none is on its way"
            )
        arrived = [load for load in loads if self._is_ours(load, loading)]
        for load in arrived:
            loading.remove(load.expert)
            if load.error is None:
                self._pool.residency.states.pin(self._layer, np.array([load.expert]))
                ready.append(load.expert)
            else:
                self.failed.append(load.expert)

    def _is_ours(self, load: Load, loading: set[int]) -> bool:
        return load.layer == self._layer and load.expert in loading
