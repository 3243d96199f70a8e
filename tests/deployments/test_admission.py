from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import OverloadedError
from deployments.admission import Admission


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(clock: Clock, hand_over: int = 2, requests: int = 2, tokens: int = 100) -> Admission:
    return Admission(requests, tokens, 100, hand_over, clock)


def test_what_the_rank_takes_at_once_does_not_count_as_waiting() -> None:
    queue = make(Clock())
    for name in "ab":
        queue.offer(name, 10, 1)
        assert queue.take() == [name]
    for name in "cd":
        queue.offer(name, 10, 1)
    assert queue.take() == []
    with pytest.raises(OverloadedError, match="3 waiting requests, the limit is 2"):
        queue.offer("e", 10, 1)
    queue.leave("a")
    assert queue.take() == ["c"]
    assert (queue.queued_requests, queue.handed_requests) == (1, 2)
    assert queue.queued_prompt_tokens == 10


def test_prompt_tokens_are_bounded_but_a_lone_prompt_fits() -> None:
    queue = make(Clock(), hand_over=0, requests=10)
    queue.offer("huge", 1000, 1)
    with pytest.raises(OverloadedError, match="prompt tokens"):
        queue.offer("b", 1, 1)
    queue.leave("huge")
    queue.offer("b", 60, 1)
    with pytest.raises(OverloadedError, match="110 prompt tokens"):
        queue.offer("c", 50, 1)


def test_a_request_of_many_sequences_runs_alone_rather_than_never() -> None:
    queue = make(Clock())
    queue.offer("wide", 1, 9)
    queue.offer("next", 1, 1)
    assert queue.take() == ["wide"]
    assert queue.take() == []
    queue.leave("wide")
    assert queue.take() == ["next"]


def test_nothing_is_handed_over_without_a_rank() -> None:
    queue = make(Clock(), hand_over=0)
    queue.offer("a", 1, 1)
    assert queue.take() == []
    queue.hand_over_sequences = 1
    assert queue.take() == ["a"]


def test_retry_after_follows_the_rate_of_departures() -> None:
    clock = Clock()
    queue = make(clock, hand_over=1, requests=20)
    for number in range(10):
        queue.offer(str(number), 1, 1)
        queue.take()
        clock.now_s += 0.5
        queue.leave(str(number))
    for number in range(9):
        queue.offer(f"w{number}", 1, 1)
    assert queue.retry_after_s() == 5.0  # ten to go, two a second
    clock.now_s += 61
    assert queue.retry_after_s() == 2.0  # nothing is known of the last minute


def test_waiting_too_long_is_told_apart() -> None:
    clock = Clock()
    queue = make(clock, hand_over=0)
    queue.offer("old", 1, 1)
    clock.now_s += 5
    queue.offer("new", 1, 1)
    assert queue.overdue(4.0) == ["old"]


@given(st.lists(st.tuples(st.sampled_from("oltr"), st.integers(0, 9), st.integers(1, 3))))
def test_counts_agree_with_a_simple_model(actions: list[tuple[str, int, int]]) -> None:
    queue = make(Clock(), hand_over=4, requests=3, tokens=50)
    waiting: dict[str, int] = {}
    handed: set[str] = set()
    for serial, (action, which, size) in enumerate(actions):
        known = [*waiting, *handed]
        if action == "o":
            try:
                queue.offer(f"n{serial}", size, size)
                waiting[f"n{serial}"] = size
            except OverloadedError:
                assert waiting
        elif action == "t":
            for name in queue.take():
                del waiting[name]
                handed.add(name)
        elif known:
            name = known[which % len(known)]
            queue.leave(name)
            waiting.pop(name, None)
            handed.discard(name)
        assert queue.queued_ids() == list(waiting)
        assert queue.queued_prompt_tokens == sum(waiting.values())
        assert queue.handed_requests == len(handed)
        assert len(waiting) <= 4
