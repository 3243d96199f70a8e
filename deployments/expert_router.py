"""Serve's request router for a model's replicas: a thin adapter around `Dispatcher`.

What of Serve is private or easy to get wrong is here, and pinned by tests/deployments/
test_expert_router.py:

- `FIFOMixin`: without it, two calls that one HTTP request makes hang. With it Serve hands the
  chosen replica to the oldest waiting call; `_get_pending_request_matching_metadata` is its own
  hook for another one, so that in a burst each call gets the replica that was chosen for it.
- `should_backoff` has to be set, or the router spins while all replicas are full.
- Serve pickles this module by value: state that others read lives in `dispatch_counts`.
- Serve sends reports on when they changed, so a report's age says nothing by itself.
- A replica's end of a call may be told in another thread.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from deployments.dispatch_counts import counts_of
from deployments.dispatch_settings import DispatchSettings
from deployments.dispatcher import Dispatcher
from deployments.replica_report import ReplicaReport
from deployments.routed_ask import RoutedAsk, decode_ask

log = logging.getLogger("ray.serve")

_REMEMBERED_REQUESTS = 4096


@dataclass(slots=True)
class _Placed:
    """A call on its way: where it is counted until Serve says where it went."""

    routed: RoutedAsk
    replica: str
    ticket: int


class ExpertRouter(FIFOMixin, RequestRouter):
    """Ranks replicas by what a request costs there; other calls go to the shortest queue."""

    def initialize_state(
        self, settings: dict[str, Any] | None = None, prefix_cache: bool = True, **_: Any
    ) -> None:
        """Serve's hook: `request_router_kwargs`, which are plain values."""
        self._dispatcher = Dispatcher(
            DispatchSettings.model_validate(settings or {}),
            time.time,
            random.getrandbits(32),
            counts_of(self._deployment_id.name),
        )
        self._prefix_cache = prefix_cache
        self._counts = self._dispatcher.counts
        self._told: dict[str, list[float]] = {}
        self._placed: dict[int, _Placed] = {}
        self._open: dict[tuple[str, str], deque[int]] = {}
        self._tried: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._error_said = False

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, so that Serve takes the next one where the first is full."""
        routed = None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            if len(pending_request.args) > 1:
                routed = decode_ask(pending_request.args[1])
        if routed is None or pending_request is None or not candidate_replicas:
            return _shortest_queue(candidate_replicas)
        # A fault of ours is no reason to fail a request: Serve takes the shortest queue then.
        try:
            return self._ranked(candidate_replicas, pending_request, routed)
        except Exception:
            self._failed()
            return _shortest_queue(candidate_replicas)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's news: which replicas there are, and what they report."""
        try:
            self._read_reports(replicas)
        except Exception:
            self._failed()
        super().update_replicas(replicas)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Serve's hook: a replica has taken a call."""
        call = (replica_id.unique_id, pending_request.metadata.internal_request_id)
        for ticket in self._open.get(call, ()):
            if self._dispatcher.arrived(ticket):
                break

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve's hook, from any thread: a call is over, however it ended."""
        key = (replica_id.unique_id, internal_request_id)
        self._event_loop.call_soon_threadsafe(self._ended, key)

    def _failed(self) -> None:
        self._counts.errors += 1
        if not self._error_said:
            self._error_said = True
            log.exception("The dispatcher failed; Serve chooses where it does")

    def _ranked(
        self, candidates: list[RunningReplica], pending: PendingRequest, routed: RoutedAsk
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        if not self._prefix_cache:
            routed = RoutedAsk(routed.request_id, replace(routed.ask, prefix=()))
        choice = self._dispatcher.choose(routed.ask, list(by_name))
        refused = self._tried.get(routed.request_id, ())
        order = sorted(choice.replicas, key=lambda name: refused.count(name))
        self._place(pending, routed, order[0])
        if log.isEnabledFor(logging.DEBUG):
            costs = zip(choice.replicas, choice.costs_s, strict=True)
            costed = ", ".join(f"{name} {cost:.4g}" for name, cost in costs)
            log.debug("%s -> %s by %s: %s", routed.request_id, order[0], choice.reason, costed)
        return [[by_name[name]] for name in order]

    def _place(self, pending: PendingRequest, routed: RoutedAsk, replica: str) -> None:
        """Counts the call there at once: the next choice may come before Serve has sent it."""
        key = id(pending.future)
        placed = self._placed.get(key)
        if placed is None:
            pending.future.add_done_callback(
                partial(self._assigned, key, pending.metadata.internal_request_id)
            )
        else:
            self._dispatcher.ended(placed.ticket)
        ticket = self._dispatcher.sent(replica, routed.ask)
        self._placed[key] = _Placed(routed, replica, ticket)

    def _assigned(self, key: int, internal_request_id: str, future: Any) -> None:
        """Serve has settled where the call goes, or nobody waits for it any more."""
        placed = self._placed.pop(key)
        if future.cancelled() or future.exception() is not None:
            self._dispatcher.ended(placed.ticket)
            return
        name = future.result().replica_id.unique_id
        if name != placed.replica:
            self._counts.elsewhere += 1
            self._dispatcher.ended(placed.ticket)
            placed.ticket = self._dispatcher.sent(name, placed.routed.ask)
        tried = self._tried.pop(placed.routed.request_id, ())
        self._tried[placed.routed.request_id] = (*tried, name)
        if len(self._tried) > _REMEMBERED_REQUESTS:
            self._tried.popitem(last=False)
        call = (name, internal_request_id)
        self._open.setdefault(call, deque()).append(placed.ticket)

    def _ended(self, call: tuple[str, str]) -> None:
        tickets = self._open.get(call)
        if not tickets:
            return
        self._dispatcher.ended(tickets.popleft())
        if not tickets:
            del self._open[call]

    def _read_reports(self, replicas: list[RunningReplica]) -> None:
        names = set()
        for replica in replicas:
            name = replica.replica_id.unique_id
            names.add(name)
            numbers = (replica.routing_stats or {}).get("report")
            if numbers is None or numbers == self._told.get(name):
                continue
            self._told[name] = numbers
            self._dispatcher.report(name, ReplicaReport.from_floats(numbers))
        self._dispatcher.keep(names)
        self._told = {name: numbers for name, numbers in self._told.items() if name in names}

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> Any:
        """FIFOMixin's hook: the call that a replica was chosen for, while it still waits."""
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None


def _shortest_queue(candidates: list[RunningReplica]) -> list[list[RunningReplica]]:
    """Serve takes the shorter queue of two at random, and looks at the others if both are full."""
    order = random.sample(candidates, len(candidates))
    return [order[:2], order[2:]]
