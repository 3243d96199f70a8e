"""How fast a queue drains: what a refused request is told of when to come back.

What is measured is how long a request holds a place of the rank while others wait for one: the time
to its first token, and the time of each token after it. Running requests count as soon as they have
tokens, so that there is an estimate before anything has ended. Time in which nobody waited does not
enter: a pause, or a rank with free places, says nothing about a full one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

_SAMPLES = 32


@dataclass(slots=True)
class _Held:
    """A request that the rank holds or held. Times are the clock's."""

    since_s: float
    tokens_at_most: int
    contended: bool = False
    first_token_s: float | None = None
    end_s: float | None = None
    tokens: int = 0


class DrainRate:
    """Watches the requests that the rank holds. Plain; the clock is passed in."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._ended: deque[_Held] = deque(maxlen=_SAMPLES)
        self._lengths: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)

    def begin(self, request_id: str, tokens_at_most: int) -> None:
        """The rank got a request that may produce so many tokens, all sequences together."""
        self._held[request_id] = _Held(self._clock(), max(1, tokens_at_most))

    def exchange(self, leaving: str, coming: str, tokens_at_most: int) -> None:
        """One without tokens gives its place, and the time it has had it, to another."""
        held = self._held.pop(leaving)
        self._held[coming] = replace(held, tokens_at_most=max(1, tokens_at_most))

    def swap(self, one: str, other: str) -> None:
        """Two without tokens take each other's places."""
        first, second = self._held[one], self._held[other]
        first.since_s, second.since_s = second.since_s, first.since_s

    def contend(self) -> None:
        """Somebody waits: what is held now is held at full load."""
        for held in self._held.values():
            held.contended = True

    def progress(self, request_id: str, tokens: int) -> None:
        """`tokens` more of the request's answer are there."""
        held = self._held.get(request_id)
        if held is not None and tokens > 0:
            if held.first_token_s is None:
                held.first_token_s = self._clock()
            held.tokens += tokens

    def end(self, request_id: str, completed: bool) -> None:
        """The request left its place; one given up by its client says nothing of the others."""
        held = self._held.pop(request_id, None)
        if held is None or not completed:
            return
        held.end_s = self._clock()
        self._lengths.append((held.tokens, held.tokens_at_most))
        if held.contended:
            self._ended.append(held)

    def wait_s(self, ahead: Iterable[int]) -> float | None:
        """Seconds until a request gets a place, None if unknown.

        `ahead` holds, in order, the most tokens of each request that gets one before it.
        """
        now = self._clock()
        seen = [held for held in self._held.values() if held.contended and held.tokens]
        seen += self._ended
        if not seen or not self._held:
            return None
        first_s = _first_token_s(seen)
        token_s = _token_s(seen, now, first_s)
        usual = self._usual_share()

        def whole_s(tokens_at_most: int) -> float:
            return first_s + max(0.0, tokens_at_most * usual - 1) * token_s

        def left_s(held: _Held) -> float:
            if not held.tokens:
                return max(0.0, whole_s(held.tokens_at_most) - (now - held.since_s))
            return max(0.0, held.tokens_at_most * usual - held.tokens) * token_s

        free_at = [left_s(held) for held in self._held.values()]
        heapq.heapify(free_at)
        for tokens in ahead:
            heapq.heapreplace(free_at, free_at[0] + whole_s(tokens))
        return free_at[0]

    def _usual_share(self) -> float:
        """Of the tokens a request may produce, how many the last ones did."""
        asked = sum(most for _, most in self._lengths)
        return sum(tokens for tokens, _ in self._lengths) / asked if asked else 1.0


def _first_token_s(seen: list[_Held]) -> float:
    """Mean seconds from taking a place to the first token."""
    delays = [(held.first_token_s or held.end_s or held.since_s) - held.since_s for held in seen]
    return sum(delays) / len(delays)


def _token_s(seen: list[_Held], now: float, first_s: float) -> float:
    """Seconds of a place for each token after the first; before there is one, as for the first."""
    started = [(held, held.first_token_s) for held in seen if held.first_token_s is not None]
    tokens = sum(held.tokens - 1 for held, _ in started)
    spent_s = sum((held.end_s or now) - first for held, first in started)
    return spent_s / tokens if tokens else first_s
