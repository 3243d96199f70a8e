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

from expert_pool.crowd import crowded_order
from expert_pool.read_ahead import PassTimer
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
        self._done: set[int] = set()
        """Experts that have been computed; kept while others wait for their slots."""
        self._timer = None if pool.read_ahead is None else PassTimer(pool.read_ahead)

    def __iter__(self) -> Generator[IntArray, None, None]:
        states = self._pool.residency.states
        if not states.is_whole(self._layer):
            resident = states.is_resident(self._layer, self._experts)
            if not resident.all():
                yield from self._in_waves(self._experts[resident], self._experts[~resident])
                return
        states.pin(self._layer, self._experts)
        try:
            self._read_ahead()
            yield self._experts
        finally:
            states.unpin(self._layer, self._experts)
            if self._timer is not None:
                self._timer.computed()
                self._timer.over()

    def _in_waves(self, hits: IntArray, missing: IntArray) -> Generator[IntArray, None, None]:
        layer, states = self._layer, self._pool.residency.states
        states.pin(layer, hits)
        ready: list[int] = hits.tolist()  # in the order in which they are computed
        loading: set[int] = set()
        waiting: deque[int] = deque()
        leavers: deque[int] = deque()
        room = self._pool.residency.room_for(layer, self._experts)
        if self._experts.size > room:
            missing, leavers = self._crowded(hits, missing, room)
            ready.sort(key=lambda expert: expert not in leavers)
        # While experts wait for slots, few are computed at a time, so that slots come free early.
        few = max(1, self._pool.residency.quotas[layer] // 4)
        try:
            for expert in missing.tolist():
                if states.state[layer, expert] == State.LOADING:
                    self._pool.hurry(layer, expert)
                    loading.add(expert)
                else:
                    waiting.append(expert)
            began = False
            while ready or loading or waiting:
                self._begin_loads(waiting, loading, leavers)
                if not began:
                    began = True
                    self._read_ahead(waits=bool(waiting))
                if ready:
                    group = np.array(sorted(ready[:few] if waiting else ready), dtype=np.int64)
                    if self._timer is not None:
                        self._timer.computes()
                    yield group
                    if self._timer is not None:
                        self._timer.computed()
                    del ready[: group.size]
                    states.unpin(layer, group)
                    if leavers:
                        self._done.update(group.tolist())
                    self._collect(False, loading, ready)
                elif leavers and not loading:
                    leavers.clear()  # a prefetch holds a slot: whoever can leave does
                elif loading or waiting:
                    started = time.perf_counter()
                    self._collect(True, loading, ready)
                    stalled_s = time.perf_counter() - started
                    self._pool.stats.stall_s += stalled_s
                    if self._timer is not None:
                        self._timer.waited(stalled_s)
        finally:
            # Empty unless the step broke off.
            states.unpin(layer, np.array(ready, dtype=np.int64))
            if self._timer is not None:
                self._timer.over()

    def _read_ahead(self, waits: bool = False) -> None:
        """Behind this layer's own reads, a later one's begin; `waits`: some of its own do not."""
        timer, ahead = self._timer, self._pool.read_ahead
        if timer is not None and ahead is not None:
            timer.alone = not (ahead.start(self._layer) or waits)
            timer.computes()

    def _crowded(self, hits: IntArray, missing: IntArray, room: int) -> tuple[IntArray, deque[int]]:
        """More experts than slots: in which order to read `missing`, and who leaves in which order.

        Both are settled before anything is read, so that who is here afterwards depends on what
        was asked, not on which read came first.
        """
        residency = self._pool.residency
        order, leavers = crowded_order(
            residency.policy,
            self._layer,
            hits,
            missing,
            residency.evictable(self._layer),
            room,
            residency.hot.get(self._layer),
        )
        return order, deque(leavers.tolist())

    def _begin_loads(self, waiting: deque[int], loading: set[int], leavers: deque[int]) -> None:
        residency = self._pool.residency
        for expert in [e for e in waiting if residency.is_barred(self._layer, e)]:
            waiting.remove(expert)
            self.failed.append(expert)
        if not waiting:
            return
        if leavers:
            self._let_go(leavers, len(waiting))
            admitted = residency.admit(self._layer, list(waiting)[: self._room()])
        else:
            admitted = residency.admit(self._layer, list(waiting))
        if len(admitted) < len(waiting) and self._pool.call_off_preloads(self._layer):
            admitted += residency.admit(self._layer, list(waiting)[len(admitted) :])
        for expert, slot in admitted:
            waiting.popleft()
            loading.add(expert)
            self._pool.submit(self._layer, expert, slot, DEMAND)

    def _room(self) -> int:
        return self._pool.residency.num_free(self._layer)

    def _let_go(self, leavers: deque[int], wanted: int) -> None:
        """Evict the first of `leavers`, in order, until `wanted` slots are free."""
        residency = self._pool.residency
        states, pins = residency.states.state[self._layer], residency.states.pins[self._layer]
        while leavers and self._room() < wanted:
            expert = leavers[0]
            if pins[expert] or states[expert] == State.LOADING:
                return  # being computed, or still to be
            if expert not in self._done and expert in self._experts:
                if expert not in self.failed:
                    return
            else:
                residency.evict_if_idle(self._layer, expert)
            leavers.popleft()

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
            if self._timer is not None:
                self._timer.read(load)
            if load.error is None:
                self._pool.residency.states.pin(self._layer, np.array([load.expert]))
                ready.append(load.expert)
            else:
                self.failed.append(load.expert)

    def _is_ours(self, load: Load, loading: set[int]) -> bool:
        return load.layer == self._layer and load.expert in loading
