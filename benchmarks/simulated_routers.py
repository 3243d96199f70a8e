"""Ways to choose a replica, for the dispatch simulator: the dispatcher, and what it is held to.

`LeastLoaded` and `PowerOfTwo` see true numbers of outstanding requests at this moment, as Serve's
own probing gives them; `Experts`, the dispatcher, what replicas report from time to time, and what
it has sent itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from benchmarks.routed_requests import RoutedRequest
from benchmarks.simulated_replica import SimulatedReplica
from deployments.dispatch_settings import DispatchSettings
from deployments.dispatcher import Ask, Dispatcher
from deployments.replica_report import ReplicaReport


class Router(Protocol):
    """Chooses where a request goes."""

    def choose(self, routed: RoutedRequest, replicas: Sequence[SimulatedReplica]) -> int:
        """Index of the replica that gets it."""

    def ended(self, number: int) -> None:
        """A request is over."""

    def report(self, replica: str, report: ReplicaReport | None) -> None:
        """News of a replica have come."""


class LeastLoaded:
    """Fewest outstanding requests, truly and at once; ties by chance."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def choose(self, routed: RoutedRequest, replicas: Sequence[SimulatedReplica]) -> int:
        """As `Router.choose`."""
        return self._least(replicas, range(len(replicas)))

    def ended(self, number: int) -> None:
        """Nothing to note."""

    def report(self, replica: str, report: ReplicaReport | None) -> None:
        """Nothing to note."""

    def load(self, replica: SimulatedReplica) -> int:
        """What is to be least."""
        return replica.outstanding

    def _least(self, replicas: Sequence[SimulatedReplica], among: Sequence[int]) -> int:
        loads = [(self.load(replicas[at]), float(self._draw.random()), at) for at in among]
        return min(loads)[2]


class LeastRows(LeastLoaded):
    """Fewest rows still to pass: knows how long every answer will be, as nobody does."""

    def load(self, replica: SimulatedReplica) -> int:
        """Rows."""
        return replica.outstanding_rows


class RoundRobin(LeastLoaded):
    """One after the other."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._turn = 0

    def choose(self, routed: RoutedRequest, replicas: Sequence[SimulatedReplica]) -> int:
        """As `Router.choose`."""
        self._turn += 1
        return self._turn % len(replicas)


class PowerOfTwo(LeastLoaded):
    """The less loaded of two drawn by chance, as Serve's own router."""

    def choose(self, routed: RoutedRequest, replicas: Sequence[SimulatedReplica]) -> int:
        """As `Router.choose`."""
        return self._least(replicas, self._draw.permutation(len(replicas))[:2].tolist())


class DomainBound(LeastLoaded):
    """True domains, each bound for ever to its share of the replicas; the least loaded of them."""

    def __init__(self, seed: int, domains: Sequence[str], replicas: int) -> None:
        super().__init__(seed)
        number, each = len(domains), max(1, replicas // len(domains))
        self._bound = {
            domain: [(at * replicas // number + i) % replicas for i in range(each)]
            for at, domain in enumerate(sorted(domains))
        }

    def choose(self, routed: RoutedRequest, replicas: Sequence[SimulatedReplica]) -> int:
        """As `Router.choose`."""
        return self._least(replicas, self._bound[routed.document.domain])


class Placed(LeastLoaded):
    """As somebody chose before, by number of the request."""

    def __init__(self, placed: Sequence[int]) -> None:
        super().__init__(0)
        self._placed = placed

    def choose(self, routed: RoutedRequest, replicas: Sequence[SimulatedReplica]) -> int:
        """As `Router.choose`."""
        return self._placed[routed.number]


class Experts:
    """The dispatcher of the service, fed by the replicas' reports."""

    def __init__(
        self, seed: int, clock: Callable[[], float], settings: DispatchSettings | None = None
    ) -> None:
        self.dispatcher = Dispatcher(settings or DispatchSettings(), clock, seed)
        self._tickets: dict[int, int] = {}

    def choose(self, routed: RoutedRequest, replicas: Sequence[SimulatedReplica]) -> int:
        """As `Router.choose`."""
        document = routed.document
        ask = Ask(
            prompt_tokens=document.prompt_rows,
            max_tokens=document.rows - document.prompt_rows + 1,
            domain=routed.label,
            confidence=routed.confidence,
        )
        names = [replica.name for replica in replicas]
        chosen = self.dispatcher.choose(ask, names).replicas[0]
        self._tickets[routed.number] = ticket = self.dispatcher.sent(chosen, ask)
        self.dispatcher.arrived(ticket)
        return names.index(chosen)

    def ended(self, number: int) -> None:
        """As `Router.ended`."""
        self.dispatcher.ended(self._tickets.pop(number))

    def report(self, replica: str, report: ReplicaReport | None) -> None:
        """As `Router.report`."""
        self.dispatcher.report(replica, report)
