"""Several replicas behind one router, in simulated time, on requests whose routing is known.

Replicas report every REPORT_S, not all at the same moment; a report arrives REPORT_DELAY_S later.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.routed_requests import RoutedRequest
from benchmarks.simulated_replica import Counts, Finished, ReplicaShape, SimulatedReplica
from benchmarks.simulated_routers import Router

REPORT_S = 0.5
"""Seconds between two reports of a replica."""
REPORT_DELAY_S = 0.05
"""From a replica over the controller to the router."""

_ARRIVAL, _STEP_ENDS, _REPORT, _REPORTED = range(4)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run showed, after its warm-up."""

    counts: Counts
    """Of all replicas."""
    finished: tuple[Finished, ...]
    seconds: float
    by_replica: tuple[Counts, ...]
    placed: tuple[int, ...]
    """Replica of each request, in order of number."""

    @property
    def misses_per_token(self) -> float:
        """Missing experts a row, over all layers."""
        return self.counts.misses / self.counts.rows

    @property
    def hit_rate(self) -> float:
        """Share of demand accesses."""
        return 1.0 - self.counts.misses / self.counts.accesses

    def queue_s(self, percent: float) -> float:
        """Percentile of the time from arrival to the first step."""
        waits = [x.admitted_s - x.arrived_s for x in self.finished]
        return float(np.percentile(waits, percent))

    def latency_s(self, percent: float) -> float:
        """Percentile of the time from arrival to the end."""
        return float(np.percentile([x.ended_s - x.arrived_s for x in self.finished], percent))


class Clock:
    """Simulated seconds; deciders are given it as theirs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The present time."""
        return self.now_s


class DispatchSimulator:
    """One run: replicas, one router, one list of requests."""

    def __init__(
        self,
        shape: ReplicaShape,
        replicas: int,
        requests: Sequence[RoutedRequest],
        make_router: Callable[[Clock], Router],
        warm_up: float = 0.25,
    ) -> None:
        """`warm_up`: share of the requests that come before counting begins."""
        self.clock = Clock()
        most = max(routed.document.rows for routed in requests)
        self.replicas = [
            SimulatedReplica(f"replica-{n}", shape, most, self.clock) for n in range(replicas)
        ]
        self.router = make_router(self.clock)
        self._requests = requests
        self._warm = int(len(requests) * warm_up)
        self._events: list[tuple[float, int, int, int]] = []
        self._number = 0
        self._reports: dict[int, Any] = {}
        self._busy = [False] * replicas

    def run(self) -> Outcome:
        """To the end of the last request. Steps count until the last one has come."""
        requests, replicas = self._requests, self.replicas
        for at, routed in enumerate(requests):
            self._at(routed.at_s, _ARRIVAL, at)
        for at in range(len(replicas)):
            self._at(REPORT_S * at / len(replicas), _REPORT, at)
        finished: list[Finished] = []
        placed = [0] * len(requests)
        before = after = [Counts()] * len(replicas)
        began_s = until_s = 0.0
        while len(finished) < len(requests):
            self.clock.now_s, _, kind, at = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                if at == self._warm:
                    before, began_s = [x.counts.plus(Counts()) for x in replicas], self.clock.now_s
                chosen = self.router.choose(requests[at], replicas)
                placed[at] = chosen
                replicas[chosen].add(requests[at])
                self._go_on(chosen)
                if at + 1 == len(requests):
                    after, until_s = [x.counts.plus(Counts()) for x in replicas], self.clock.now_s
            elif kind == _STEP_ENDS:
                self._busy[at] = False
                for done in replicas[at].end_step():
                    self.router.ended(done.number)
                    finished.append(done)
                self._go_on(at)
            elif kind == _REPORT:
                self._reports[at] = replicas[at].report()
                self._at(self.clock.now_s + REPORT_DELAY_S, _REPORTED, at)
                self._at(self.clock.now_s + REPORT_S, _REPORT, at)
            else:
                self.router.report(replicas[at].name, self._reports[at])
        if until_s <= began_s:  # all came at once
            after, until_s = [x.counts for x in replicas], self.clock.now_s
        by_replica = tuple(x.minus(y) for x, y in zip(after, before, strict=True))
        total = Counts()
        for part in by_replica:
            total = total.plus(part)
        counted = tuple(x for x in finished if x.number >= self._warm)
        return Outcome(total, counted, until_s - began_s, by_replica, tuple(placed))

    def _at(self, when_s: float, kind: int, at: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (when_s, self._number, kind, at))

    def _go_on(self, at: int) -> None:
        if self._busy[at]:
            return
        took_s = self.replicas[at].begin_step()
        if took_s is not None:
            self._busy[at] = True
            self._at(self.clock.now_s + took_s, _STEP_ENDS, at)
