"""The bounded queue of a supervisor: who may wait, who goes next, when a refused one may return."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from core.errors import OverloadedError
from core.request import Priority
from deployments.drain_rate import DrainRate
from deployments.settings import ServingSettings, hand_over_limit

BATCH_PATIENCE_S = 60.0
"""A waiting batch request counts as if it had come this much later than it did: interactive ones
pass it, but not for ever."""
BATCH_SHARE = 0.5
"""Part of the queue that batch requests may fill; the rest is kept for interactive ones."""
_RETRY_MIN_S = 1.0
_RETRY_MAX_S = 600.0
_RETRY_UNKNOWN_S = 2.0


def most_at_once(
    serving: ServingSettings, max_sequences: int, sequences: int, priority: Priority
) -> int:
    """Requests of so many sequences each that idle replicas take at the same moment.

    More will never be taken, whenever they come back.
    """
    handed = max(1, hand_over_limit(max_sequences) // sequences)
    queued = serving.max_queued_requests
    if priority == "batch":
        queued = max(1, int(queued * BATCH_SHARE))
    return min(handed + queued, serving.max_ongoing_requests) * serving.replicas


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue: its size, and since when it waits."""

    request_id: str
    prompt_tokens: int
    sequences: int
    tokens_at_most: int
    since_s: float
    priority: Priority


class Admission:
    """First in, first out within a priority, bounded by requests and by prompt tokens.

    A lone request always fits by tokens, so that a prompt above the bound is not refused for
    ever. `Retry-After` is the time until the present queue has been handed to the rank.
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
        self.choice_sequences = 0
        """Sequences of those who wait that the rank is shown besides, to choose among."""
        self._clock = clock
        self._queues: dict[Priority, OrderedDict[str, Waiting]] = {
            "interactive": OrderedDict(),
            "batch": OrderedDict(),
        }
        self._shown: set[str] = set()
        """Waiting requests that the rank has got already; they wait on, as it is full."""
        self._handed: dict[str, int] = {}
        self._silent: dict[str, Waiting] = {}
        """Handed requests of which nothing has come yet, in order."""
        self._tokens: dict[Priority, int] = {"interactive": 0, "batch": 0}
        self._rate = DrainRate(clock)

    @property
    def queued_requests(self) -> int:
        """Requests that wait here."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens of the requests that wait here."""
        return sum(self._tokens.values())

    @property
    def handed_requests(self) -> int:
        """Requests that the rank holds."""
        return len(self._handed)

    def offer(
        self,
        request_id: str,
        prompt_tokens: int,
        sequences: int,
        priority: Priority = "interactive",
        tokens_at_most: int = 1,
        patience_s: float | None = None,
    ) -> None:
        """Queue a request. Raises OverloadedError when the queue is full.

        What the rank can take at once does not count against the queue's bounds. A request that
        would wait longer than `patience_s`, as far as is known, is refused at once.
        `tokens_at_most` is what all its sequences may produce.
        """
        free = self.hand_over_sequences - sum(self._handed.values())
        if free < sequences or self.queued_requests:
            self._refuse_if_full(prompt_tokens, priority)
            if patience_s is not None:
                self._refuse_if_hopeless(priority, patience_s)
        self._queues[priority][request_id] = Waiting(
            request_id, prompt_tokens, sequences, tokens_at_most, self._clock(), priority
        )
        self._tokens[priority] += prompt_tokens
        if free < sequences:
            self._rate.contend()

    def take(self) -> list[str]:
        """The requests to hand to the rank now, in order.

        Among them are those that only show it what it may choose from; they still wait.
        """
        taken = []
        busy = sum(self._handed.values())
        while (first := next(self._in_order(), None)) is not None:
            fits = busy + first.sequences <= self.hand_over_sequences
            if not fits and (busy or not self.hand_over_sequences):
                break
            if first.request_id not in self._shown:
                taken.append(first.request_id)
            self._hand(first)
            self._rate.begin(first.request_id, first.tokens_at_most)
            busy += first.sequences
        if self.queued_requests:
            self._rate.contend()
            taken += self._show()
        return taken

    def progress(self, request_id: str, tokens: int) -> None:
        """Something came of a request that the rank has, `tokens` more among it."""
        if request_id in self._shown:
            self._chosen(request_id)
        if request_id in self._silent:
            # Whoever is first to speak had the place longest, as if all had gone in order.
            before = list(takewhile(lambda other: other != request_id, self._silent))
            for other in reversed(before):
                self._rate.swap(other, request_id)
            del self._silent[request_id]
        self._rate.progress(request_id, tokens)

    def lose_rank(self) -> None:
        """What the rank was shown, the next one has not seen."""
        self.hand_over_sequences = 0
        self._shown.clear()

    def leave(self, request_id: str, completed: bool = False) -> None:
        """A request is done, cancelled or failed, wherever it was. Unknown ids are ignored."""
        if self._handed.pop(request_id, None) is None:
            self._drop(request_id)
        self._silent.pop(request_id, None)
        self._rate.end(request_id, completed)

    def waits(self, request_id: str) -> bool:
        """Whether a request waits, here or where it was shown."""
        return any(request_id in queue for queue in self._queues.values())

    def queued_ids(self) -> list[str]:
        """Requests that no rank works at: interactive ones first, each kind in order."""
        return [entry.request_id for entry in self._waiting()]

    def overdue(self, limit_s: float) -> list[str]:
        """Queued requests that wait longer than `limit_s`."""
        now = self._clock()
        return [entry.request_id for entry in self._waiting() if now - entry.since_s > limit_s]

    def retry_after_s(self, priority: Priority = "interactive") -> float:
        """Whole seconds until those who wait now, and would go first, have been handed over."""
        wait_s = self._wait_s(priority)
        if wait_s is None:
            return _RETRY_UNKNOWN_S
        return float(min(max(round(wait_s), _RETRY_MIN_S), _RETRY_MAX_S))

    def _wait_s(self, priority: Priority) -> float | None:
        kinds: tuple[Priority, ...] = ("interactive",)
        if priority == "batch":
            kinds = ("interactive", "batch")
        return self._rate.wait_s(
            entry.tokens_at_most for kind in kinds for entry in self._queues[kind].values()
        )

    def _waiting(self) -> Iterator[Waiting]:
        for queue in self._queues.values():
            yield from queue.values()

    def _in_order(self) -> Iterator[Waiting]:
        """Who goes first, and who then, as far as is known now."""
        people, batch = (iter(self._queues[kind].values()) for kind in ("interactive", "batch"))
        person, machine = next(people, None), next(batch, None)
        while person is not None and machine is not None:
            if machine.since_s + BATCH_PATIENCE_S < person.since_s:
                yield machine
                machine = next(batch, None)
            else:
                yield person
                person = next(people, None)
        left = person or machine
        if left is not None:
            yield left
            yield from people if person is not None else batch

    def _hand(self, entry: Waiting) -> None:
        self._drop(entry.request_id)
        self._handed[entry.request_id] = entry.sequences
        self._silent[entry.request_id] = entry

    def _show(self) -> list[str]:
        room, shown = self.choice_sequences if self.hand_over_sequences else 0, []
        for entry in self._in_order():
            room -= entry.sequences
            if room < 0:
                break
            if entry.request_id not in self._shown:
                shown.append(entry.request_id)
        self._shown.update(shown)
        return shown

    def _chosen(self, request_id: str) -> None:
        """The rank took a waiting one before others: it has the place of the last of those."""
        entry = next(entry for entry in self._waiting() if entry.request_id == request_id)
        self._hand(entry)
        last = next((e for e in reversed(self._silent.values()) if e is not entry), None)
        if last is None:
            self._rate.begin(request_id, entry.tokens_at_most)
            return
        self._rate.exchange(last.request_id, request_id, entry.tokens_at_most)
        del self._handed[last.request_id], self._silent[last.request_id]
        self._wait_again(last)

    def _wait_again(self, entry: Waiting) -> None:
        queue = self._queues[entry.priority]
        queue[entry.request_id] = entry
        queue.move_to_end(entry.request_id, last=False)
        self._tokens[entry.priority] += entry.prompt_tokens
        self._shown.add(entry.request_id)

    def _refuse_if_full(self, prompt_tokens: int, priority: Priority) -> None:
        queued, tokens = self.queued_requests, self.queued_prompt_tokens
        most_requests, most_tokens, whose = self._max_requests, self._max_tokens, ""
        if priority == "batch":
            most_requests = max(1, int(most_requests * BATCH_SHARE))
            most_tokens = max(1, int(most_tokens * BATCH_SHARE))
            queued, tokens = len(self._queues["batch"]), self._tokens["batch"]
            whose = " of priority batch"
        checks = (
            (queued + 1, most_requests, f"waiting requests{whose}"),
            (self.queued_requests + 1, self._max_requests, "waiting requests"),
            (self.queued_requests + len(self._handed) + 1, self._max_ongoing, "requests in all"),
            (tokens + prompt_tokens if queued else 0, most_tokens, f"prompt tokens{whose}"),
            (
                self.queued_prompt_tokens + prompt_tokens if self.queued_requests else 0,
                self._max_tokens,
                "prompt tokens",
            ),
        )
        for size, limit, what in checks:
            if size > limit:
                retry_s = self.retry_after_s(priority)
                raise OverloadedError(
                    f"The queue is full: with this request it would hold {size} {what}, the limit "
                    f"is {limit}. Come back in {retry_s:.0f} s.",
                    retry_s,
                )

    def _refuse_if_hopeless(self, priority: Priority, patience_s: float) -> None:
        wait_s = self._wait_s(priority)
        if wait_s is not None and wait_s > patience_s:
            retry_s = self.retry_after_s(priority)
            raise OverloadedError(
                f"The request would wait about {wait_s:.1f} s, and its deadline is in "
                f"{patience_s:.1f} s. Come back in {retry_s:.0f} s.",
                retry_s,
            )

    def _drop(self, request_id: str) -> None:
        self._shown.discard(request_id)
        for priority, queue in self._queues.items():
            entry = queue.pop(request_id, None)
            if entry is not None:
                self._tokens[priority] -= entry.prompt_tokens
