"""One pass of many tokens over a layer's experts, one expert after another in ascending order.

Two slots serve as buffers: while one expert is computed, the next ones are read. All other slots
keep what they hold, so a long prompt does not push out what decoding lives on. Each expert is read
at most once a pass.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np

from expert_pool.layer_major import pause
from expert_pool.store import DEMAND, PRELOAD
from expert_pool.tables import IntArray, ResidencyViolation, State

if TYPE_CHECKING:
    from expert_pool.pool import ExpertPool

BUFFERS = 2
"""Experts on their way, or here for this pass alone, at one time."""
_DENSE = 0.75
"""Where a layer used this share of its experts, the next one's first experts are read early."""


class OrderedPass:
    """Iterate for each of `experts`, pinned, alone and in order; those that failed are left out.

    An expert may be read until the next one is asked for. Close the iterator on the way out.
    """

    def __init__(self, pool: ExpertPool, layer: int, experts: IntArray) -> None:
        self.failed: list[int] = []
        """Experts that could not be read; known when the iteration is over."""
        self._pool = pool
        self._layer = layer
        self._experts = experts
        self._displaced = 0
        """Slots whose expert is still to come and has to be read for it."""
        if layer == 0:
            pool.read_early.clear()  # of a pass that broke off
        early = set(pool.read_early.pop(layer, ()))
        self._brought = early.intersection(experts.tolist())
        """Experts whose bytes were read for this pass, until they are computed."""
        self._passed = sorted(early - self._brought)
        """Experts that were read for this pass and have been computed, or are not needed after
        all: the first to leave."""

    def __iter__(self) -> Generator[IntArray, None, None]:
        self._pool.in_ordered_pass = True
        try:
            yield from self._one_by_one()
        finally:
            self._pool.in_ordered_pass = False

    def _one_by_one(self) -> Generator[IntArray, None, None]:
        states = self._pool.residency.states
        for at in range(self._experts.size):
            one = self._experts[at : at + 1]
            self._read_ahead(at)
            if not self._arrives(at):
                self.failed.append(int(one[0]))
                continue
            states.pin(self._layer, one)
            try:
                yield one
            finally:
                states.unpin(self._layer, one)
            if int(one[0]) in self._brought:
                self._brought.remove(int(one[0]))
                self._passed.append(int(one[0]))

    def _read_ahead(self, at: int) -> None:
        """Has the next missing experts read, from the one at hand on, while there are buffers."""
        rest = self._experts[at:]
        states, residency = self._pool.residency.states, self._pool.residency
        missing = rest[~states.is_resident(self._layer, rest)]
        brought = np.array(list(self._brought), dtype=np.int64)
        coming = int(np.count_nonzero(states.is_resident(self._layer, brought)))
        for expert in missing.tolist():
            if coming >= BUFFERS:
                return
            if states.state[self._layer, expert] == State.LOADING:
                self._pool.hurry(self._layer, expert)
            elif residency.is_barred(self._layer, expert):
                continue
            elif not self._begin(expert, at):
                return
            coming += 1
        if self._experts.size >= _DENSE * residency.layers[self._layer].num_experts:
            self._read_next_layer(BUFFERS - coming)

    def _begin(self, expert: int, at: int) -> bool:
        """Starts to read an expert if a slot can be had for it."""
        residency = self._pool.residency
        if not residency.num_free(self._layer):
            victim = self._victim(at, expert)
            if victim is None:
                return False
            residency.evict_if_idle(self._layer, victim)
        for _, slot in residency.admit(self._layer, [expert]):
            self._pool.submit(self._layer, expert, slot, DEMAND)
            self._brought.add(expert)
            return True
        return False

    def _victim(self, at: int, expert: int) -> int | None:
        """Who makes room for an expert: what has passed, what is not needed, what comes later."""
        residency = self._pool.residency
        candidates = residency.evictable(self._layer)
        candidates = candidates[candidates != self._experts[at]]
        while self._passed:
            if (passed := self._passed.pop()) in candidates:
                return passed
        idle = candidates[~np.isin(candidates, self._experts[at:])]
        if not idle.size and (self._displaced < BUFFERS or expert == self._experts[at]):
            self._displaced += 1
            brought = np.isin(candidates, list(self._brought))
            later = candidates[(candidates > expert) & ~brought]
            idle = later if later.size else candidates
        chosen = residency.policy.victims(self._layer, idle, 1)
        return int(chosen[0]) if len(chosen) else None

    def _arrives(self, at: int) -> bool:
        """Waits for the expert at hand; False if it cannot be had."""
        expert = int(self._experts[at])
        states, residency = self._pool.residency.states, self._pool.residency
        while (state := states.state[self._layer, expert]) != State.RESIDENT:
            if residency.is_barred(self._layer, expert):
                return False
            if (
                state != State.LOADING
                and not self._begin(expert, at)
                and self._pool.call_off_preloads(self._layer)
            ):
                continue
            if self._pool.collect(wait=False) or pause(within_layer=True):
                continue
            started = time.perf_counter()
            if not self._pool.collect(wait=True):
                raise ResidencyViolation(
                    f"layer {self._layer}: expert {expert} finds no slot and none is on its way"
                )
            self._pool.stats.stall_s += time.perf_counter() - started
        return True

    def _read_next_layer(self, buffers: int) -> None:
        """The buffers that this layer needs no more begin with the next one's first experts."""
        layer, residency = self._layer + 1, self._pool.residency
        if buffers <= 0 or layer == len(residency.layers):
            return
        early = self._pool.read_early.setdefault(layer, [])
        row = residency.states.state[layer][: residency.layers[layer].num_experts]
        missing = np.flatnonzero(row == State.UNLOADED)
        for expert in missing[: max(0, buffers - len(early))].tolist():
            # Nothing that is needed before it makes room for it.
            for _, slot in residency.admit(layer, [expert], keep=np.arange(expert)):
                self._pool.submit(layer, expert, slot, PRELOAD)
                early.append(expert)
