"""The live pool on a virtual clock: its store is an event simulation, computing takes fixed time.

Nothing sleeps and no thread runs, so a run gives the same numbers each time.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from core.step import PoolStepStats, SequencePart
from expert_pool import pool as pool_module
from expert_pool import read_ahead, waves
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from expert_pool.store import Load


class VirtualStore:
    """An ExpertStore whose readers take `read_s` an expert of virtual time, demand first."""

    def __init__(self, clock: VirtualClock, readers: int, read_s: float, record_bytes: int) -> None:
        self.clock = clock
        self.read_s = read_s
        self.record_bytes = record_bytes
        self.in_flight = 0
        self.order: list[tuple[int, int, int]] = []
        """(layer, expert, priority) of the reads that were begun, in order."""
        self._queue: list[tuple[int, int, Load, float]] = []
        self._free_at = [0.0] * readers
        self._running: list[tuple[float, int, Load]] = []
        self._number = 0

    def submit(self, load: Load) -> None:
        self.in_flight += 1
        self._number += 1
        self._queue.append((load.priority, self._number, load, self.clock.now))

    def hurry(self, load: Load) -> None:
        self._start(self.clock.now)
        if load.priority != 0:
            load.priority = 0
            self._number += 1
            self._queue = [q for q in self._queue if q[2] is not load] + [
                (0, self._number, load, self.clock.now) for q in self._queue if q[2] is load
            ]

    def call_off(self, load: Load) -> bool:
        self._start(self.clock.now)
        if load.taken:
            return False
        load.taken = True
        self._queue = [q for q in self._queue if q[2] is not load]
        self.in_flight -= 1
        return True

    def finished(self, wait: bool) -> list[Load]:
        self._start(self.clock.now)
        if wait and self._running and not self._done():
            while not self._done():
                self.clock.now = max(self.clock.now, min(end for end, _, _ in self._running))
                self._start(self.clock.now)
        loads = self._done()
        self._running = [r for r in self._running if r[2] not in loads]
        self.in_flight -= len(loads)
        return loads

    def close(self) -> None:
        pass

    def _done(self) -> list[Load]:
        return [load for end, _, load in sorted(self._running, key=lambda r: r[:2])
                if end <= self.clock.now]  # fmt: skip

    def _start(self, now: float) -> None:
        """Let the readers take up, until `now`, what was submitted by then."""
        while self._queue:
            reader = int(np.argmin(self._free_at))
            at = max(self._free_at[reader], min(q[3] for q in self._queue))
            if at > now:
                return
            ready = [q for q in self._queue if q[3] <= at]
            taken = min(ready, key=lambda q: q[:2])
            self._queue.remove(taken)
            load = taken[2]
            load.taken, load.attempts, load.full_reads = True, 1, 1
            load.record_bytes, load.began_s, load.ended_s = self.record_bytes, at, at + self.read_s
            self._free_at[reader] = load.ended_s
            self._running.append((load.ended_s, taken[1], load))
            self.order.append((load.layer, load.expert, load.priority))


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualPool:
    """Runs (step, layer) demands through a real pool; `compute_s` an expert of virtual time."""

    def __init__(self, monkeypatch, index, read_s, compute_s, readers=1, layer_s=0.0, **settings):
        self.clock = VirtualClock()
        self.compute_s, self.layer_s = compute_s, layer_s
        self.store = VirtualStore(self.clock, readers, read_s, index.record_bytes)
        fake_time = SimpleNamespace(perf_counter=self.clock, monotonic=self.clock)
        monkeypatch.setattr(waves, "time", fake_time)
        monkeypatch.setattr(read_ahead, "time", fake_time)
        monkeypatch.setattr(pool_module, "ExpertStore", lambda *_, **__: self.store)
        self.pool = ExpertPool(
            index, PoolSettings(verify_checksums=False, **settings), clock=self.clock
        )
        self.stats: list[PoolStepStats] = []

    def step(self, demand: np.ndarray, parts: tuple[SequencePart, ...] = ()) -> PoolStepStats:
        """One step that asks layer by layer for demand [layers, k], or [tokens, layers, k]."""
        rows = demand[None] if demand.ndim == 2 else demand
        pool = self.pool
        pool.begin_step(parts)
        for layer in range(rows.shape[1]):
            width = pool.index.layers[layer].num_experts
            self.clock.now += self.layer_s
            asked = rows[:, layer].ravel()
            counts = np.bincount(asked[asked >= 0], minlength=width)
            for group in pool.demand(layer, counts, len(rows)):
                self.clock.now += self.compute_s * group.size
        self.stats.append(pool.end_step())
        return self.stats[-1]

    def run(self, demands: np.ndarray) -> float:
        """Virtual seconds of all steps [steps, layers, k]."""
        began = self.clock.now
        for demand in demands:
            self.step(demand)
        return self.clock.now - began

    def total(self, name: str) -> float:
        return sum(getattr(stats, name) for stats in self.stats)

    def prefetched(self, name: str) -> float:
        return sum(getattr(stats.prefetch, name) for stats in self.stats)
