"""The bounded queue of a supervisor: who may wait, who goes next, when a refused one may return."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import OverloadedError

_RATE_SAMPLES = 64
_RATE_WINDOW_S = 60.0
_RETRY_MIN_S = 1.0
_RETRY_MAX_S = 120.0
_RETRY_UNKNOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue: its size, and since when it waits."""

    request_id: str
    prompt_tokens: int
    sequences: int
    since_s: float


class Admission:
    """First in, first out, bounded by requests and by prompt tokens.

    A lone request always fits by tokens, so that a prompt above the bound is not refused for
    ever. `Retry-After` is the time the queue needs to drain at the rate it drained lately.
    """

    def __init__(
        self,
        max_queued_requests: int,
        max_queued_prompt_tokens: int,
        max_ongoing_requests: int,
        hand_over_sequences: int,
        clock: Callable[[], float],
    ) -> None:
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_prompt_tokens
        self._max_ongoing = max_ongoing_requests
        self.hand_over_sequences = hand_over_sequences
        """Sequences that the rank may hold at once; 0 while there is no rank."""
        self._clock = clock
        self._queue: OrderedDict[str, Waiting] = OrderedDict()
        self._handed: dict[str, int] = {}
        self._tokens = 0
        self._departures: deque[float] = deque(maxlen=_RATE_SAMPLES)

    @property
    def queued_requests(self) -> int:
        """Requests that wait here."""
        return len(self._queue)

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens of the requests that wait here."""
        return self._tokens

    @property
    def handed_requests(self) -> int:
        """Requests that the rank holds."""
        return len(self._handed)

    def offer(self, request_id: str, prompt_tokens: int, sequences: int) -> None:
        """Queue a request. Raises OverloadedError when the queue is full.

        What the rank can take at once does not count against the queue's bounds.
        """
        free = self.hand_over_sequences - sum(self._handed.values())
        if free < sequences or self._queue:
            self._refuse_if_full(prompt_tokens)
        self._queue[request_id] = Waiting(request_id, prompt_tokens, sequences, self._clock())
        self._tokens += prompt_tokens

    def take(self) -> list[str]:
        """The requests to hand to the rank now, in order."""
        taken = []
        busy = sum(self._handed.values())
        while self._queue:
            first = next(iter(self._queue.values()))
            fits = busy + first.sequences <= self.hand_over_sequences
            if not fits and (busy or not self.hand_over_sequences):
                break
            self._drop(first.request_id)
            self._handed[first.request_id] = first.sequences
            busy += first.sequences
            taken.append(first.request_id)
        return taken

    def leave(self, request_id: str) -> None:
        """A request is done, cancelled or failed, wherever it was. Unknown ids are ignored."""
        if request_id in self._queue:
            self._drop(request_id)
        elif self._handed.pop(request_id, None) is not None:
            self._departures.append(self._clock())

    def queued_ids(self) -> list[str]:
        """Requests that no rank has seen, in order."""
        return list(self._queue)

    def overdue(self, limit_s: float) -> list[str]:
        """Queued requests that wait longer than `limit_s`."""
        now = self._clock()
        return [entry.request_id for entry in self._queue.values() if now - entry.since_s > limit_s]

    def retry_after_s(self) -> float:
        """Seconds until the present queue has drained at the rate of the last minute."""
        now = self._clock()
        recent = [moment for moment in self._departures if now - moment <= _RATE_WINDOW_S]
        if len(recent) < 2:
            return _RETRY_UNKNOWN_S
        rate = len(recent) / max(now - recent[0], 1e-3)
        wait_s = (len(self._queue) + 1) / rate
        return float(min(max(math.ceil(wait_s), _RETRY_MIN_S), _RETRY_MAX_S))

    def _refuse_if_full(self, prompt_tokens: int) -> None:
        full = (
            (len(self._queue) + 1, self._max_requests, "waiting requests"),
            (len(self._queue) + len(self._handed) + 1, self._max_ongoing, "requests in all"),
            (self._tokens + prompt_tokens if self._queue else 0, self._max_tokens, "prompt tokens"),
        )
        for size, limit, what in full:
            if size > limit:
                retry_s = self.retry_after_s()
                raise OverloadedError(
                    f"The queue is full: with this request it would hold {size} {what}, the limit "
                    f"is {limit}. Come back in {retry_s:.0f} s.",
                    retry_s,
                )

    def _drop(self, request_id: str) -> None:
        self._tokens -= self._queue.pop(request_id).prompt_tokens
