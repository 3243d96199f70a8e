"""What one gateway has sent to each replica and the replicas' reports do not show yet."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Sent:
    replica: str
    sequences: int
    prompt_tokens: int
    sent_s: float
    arrived_s: float = math.inf
    is_seen: bool = False


_REMEMBERED_ENDS = 1024
_LONGEST_TRIP_S = 1.0
"""A request whose arrival nobody has told of is taken to have arrived after this time."""


@dataclass(slots=True)
class Local:
    """One replica's requests of this gateway, beside its last report."""

    open: int = 0
    """Sequences sent and not ended."""
    unseen: int = 0
    """Those of them that the last report cannot have counted."""
    unseen_prompt_tokens: int = 0
    ended: int = 0
    """Sequences that it did count and that ended since."""
    first_unseen_s: float | None = None
    """When the first request was sent that no report has followed."""
    tickets: OrderedDict[int, _Sent] = field(default_factory=OrderedDict)
    """The unseen ones, in the order of sending."""
    ends: deque[tuple[float, _Sent]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_ENDS))
    """When unseen ones ended: a report on its way may still count them."""

    @property
    def oldest_s(self) -> float | None:
        """When the oldest unseen one was sent that has not ended."""
        first = next(iter(self.tickets.values()), None)
        return None if first is None else first.sent_s


class SentRequests:
    """Tickets for requests: taken when one is sent, given back when it ended. Not thread-safe."""

    def __init__(self, lag_s: float) -> None:
        """What arrived less than `lag_s` before a report is not in it yet; clocks differ."""
        self._lag_s = lag_s
        self._replicas: dict[str, Local] = {}
        self._tickets: dict[int, _Sent] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def of(self, replica: str) -> Local:
        """One replica's; zeros where nothing was sent there."""
        return self._replicas.get(replica) or Local()

    def sent(self, replica: str, sequences: int, prompt_tokens: int, now_s: float) -> int:
        """Count a request; returns its ticket."""
        local = self._replicas.setdefault(replica, Local())
        self._next += 1
        entry = _Sent(replica, sequences, prompt_tokens, now_s)
        self._tickets[self._next] = local.tickets[self._next] = entry
        local.open += sequences
        local.unseen += sequences
        local.unseen_prompt_tokens += prompt_tokens
        if local.first_unseen_s is None:
            local.first_unseen_s = now_s
        return self._next

    def arrived(self, ticket: int, now_s: float) -> bool:
        """The replica has taken a request; False if that was known, or the ticket is not."""
        entry = self._tickets.get(ticket)
        if entry is None or entry.arrived_s < math.inf:
            return False
        entry.arrived_s = now_s
        return True

    def ended(self, ticket: int, now_s: float) -> None:
        """A request is over. Unknown tickets, and those given back before, are ignored."""
        entry = self._tickets.pop(ticket, None)
        local = self._replicas.get(entry.replica) if entry is not None else None
        if entry is None or local is None:
            return
        local.open -= entry.sequences
        if entry.is_seen:
            local.ended += entry.sequences
        elif local.tickets.pop(ticket, None) is not None:
            local.unseen -= entry.sequences
            local.unseen_prompt_tokens -= entry.prompt_tokens
            local.ends.append((now_s, entry))

    def reported(self, replica: str, made_s: float) -> None:
        """A report has come that was made then: it shows what had been sent and had not ended."""
        local = self._replicas.get(replica)
        if local is None:
            return
        local.ended = sum(
            entry.sequences for ended_s, entry in local.ends if entry.sent_s <= made_s < ended_s
        )
        while local.ends and local.ends[0][0] <= made_s:
            local.ends.popleft()
        for ticket, entry in list(local.tickets.items()):
            trip_s = min(entry.arrived_s - entry.sent_s, _LONGEST_TRIP_S)
            if entry.sent_s + trip_s > made_s - self._lag_s:
                continue
            del local.tickets[ticket]
            entry.is_seen = True
            local.unseen -= entry.sequences
            local.unseen_prompt_tokens -= entry.prompt_tokens
        local.first_unseen_s = local.oldest_s

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget the other replicas and what was sent to them."""
        kept = set(replicas)
        for replica in [name for name in self._replicas if name not in kept]:
            del self._replicas[replica]
        gone = [key for key, entry in self._tickets.items() if entry.replica not in kept]
        for ticket in gone:
            del self._tickets[ticket]
