from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import OverloadedError
from deployments.admission import BATCH_PATIENCE_S, Admission


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


def test_what_a_rank_is_shown_to_choose_among_still_waits() -> None:
    queue = make(Clock(), hand_over=2, requests=3)
    queue.choice_sequences = 2
    taken = []
    for name in "abcde":
        queue.offer(name, 10, 1)
        taken += queue.take()
    assert taken == ["a", "b", "c", "d"]
    assert queue.queued_ids() == ["c", "d", "e"]
    assert (queue.queued_prompt_tokens, queue.handed_requests) == (30, 2)
    with pytest.raises(OverloadedError, match="4 waiting requests, the limit is 3"):
        queue.offer("f", 10, 1)
    queue.leave("a")
    assert queue.take() == ["e"]  # c has a place now, and e is shown
    assert queue.queued_ids() == ["d", "e"]
    queue.lose_rank()
    assert queue.queued_ids() == ["d", "e"]
    assert queue.take() == []
    for name in "bc":
        queue.leave(name)
    queue.hand_over_sequences = 2
    assert queue.take() == ["d", "e"]  # another rank has not seen them


def test_whom_the_rank_chooses_has_the_place_of_one_who_waits_on() -> None:
    queue = make(Clock(), hand_over=2, requests=9)
    queue.choice_sequences = 3
    for name, priority in (("a", "interactive"), ("b", "batch"), ("c", "interactive")):
        queue.offer(name, 10, 1, priority)
    queue.offer("d", 10, 2)
    assert queue.take() == ["a", "c", "d", "b"]
    queue.progress("a", 1)
    queue.progress("d", 1)
    assert queue.queued_ids() == ["c", "b"]
    assert (queue.queued_prompt_tokens, queue.handed_requests) == (20, 2)
    queue.progress("b", 1)
    assert queue.queued_ids() == ["c"]
    assert queue.handed_requests == 3  # it runs, whoever else does
    for name in "adb":
        queue.leave(name, completed=True)
    assert queue.take() == []
    assert (queue.queued_ids(), queue.handed_requests) == ([], 1)


def test_retry_after_follows_the_rate_of_departures() -> None:
    clock = Clock()
    queue = make(clock, hand_over=1, requests=20)
    for number in range(12):
        queue.offer(str(number), 1, 1)
    for number in range(3):
        assert queue.take() == [str(number)]
        clock.now_s += 0.5
        queue.progress(str(number), 1)
        queue.leave(str(number), completed=True)
    queue.take()
    assert queue.retry_after_s() == 4.0  # nine to go, two a second
    assert make(clock).retry_after_s() == 2.0  # nothing is known


def test_interactive_requests_pass_batch_ones_but_not_for_ever() -> None:
    clock = Clock()
    queue = make(clock, hand_over=1, requests=20)
    queue.offer("running", 1, 1)
    queue.take()
    queue.offer("batch", 1, 1, "batch")
    clock.now_s += 5
    queue.offer("person", 1, 1)
    assert queue.queued_ids() == ["person", "batch"]
    queue.leave("running")
    assert queue.take() == ["person"]
    clock.now_s += BATCH_PATIENCE_S
    queue.offer("late", 1, 1)
    queue.leave("person")
    assert queue.take() == ["batch"]


def test_batch_requests_leave_room_for_interactive_ones() -> None:
    queue = make(Clock(), hand_over=0, requests=4, tokens=100)
    queue.offer("a", 10, 1, "batch")
    with pytest.raises(OverloadedError, match="60 prompt tokens of priority batch"):
        queue.offer("b", 50, 1, "batch")
    queue.offer("b", 10, 1, "batch")
    with pytest.raises(OverloadedError, match="3 waiting requests of priority batch"):
        queue.offer("c", 1, 1, "batch")
    queue.offer("d", 70, 1)
    with pytest.raises(OverloadedError, match="101 prompt tokens"):
        queue.offer("e", 11, 1)
    queue.offer("f", 1, 1)
    with pytest.raises(OverloadedError, match="5 waiting requests"):
        queue.offer("g", 1, 1)


def test_who_cannot_be_served_before_the_deadline_is_told_at_once() -> None:
    clock = Clock()
    queue = make(clock, hand_over=1, requests=20)
    for name in "abc":
        queue.offer(name, 1, 1, tokens_at_most=11, patience_s=0.1)  # nothing is known yet
    queue.take()
    clock.now_s += 1.0
    queue.progress("a", 1)
    clock.now_s += 1.0
    queue.progress("a", 5)
    # Five tokens more of a, then twice a first token and ten others: 1 + 2 x 3 seconds.
    assert queue.retry_after_s() == 7.0
    with pytest.raises(OverloadedError, match=r"about 7\.0 s, and its deadline is in 6\.5 s"):
        queue.offer("d", 1, 1, patience_s=6.5)
    queue.offer("d", 1, 1, patience_s=7.5)


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


@given(
    st.lists(st.tuples(st.sampled_from("oootlppx"), st.integers(0, 9), st.integers(1, 3))),
    st.integers(0, 6),
)
def test_who_is_shown_is_sent_once_and_waits_until_something_comes_of_it(
    actions: list[tuple[str, int, int]], choice: int
) -> None:
    queue = make(Clock(), hand_over=4, requests=20, tokens=500)
    queue.choice_sequences = choice
    sizes: dict[str, int] = {}
    sent: set[str] = set()
    spoke: set[str] = set()
    for serial, (action, which, size) in enumerate(actions):
        known = list(sizes)
        if action == "o":
            priority = "batch" if which < 3 else "interactive"
            queue.offer(f"n{serial}", size, size, priority)
            sizes[f"n{serial}"] = size
        elif action == "t":
            taken = queue.take()
            assert not sent & set(taken)
            sent |= set(taken)
        elif action == "p" and sent:
            name = sorted(sent)[which % len(sent)]
            queue.progress(name, 1)
            spoke.add(name)
        elif action == "l" and known:
            name = known[which % len(known)]
            queue.leave(name, completed=name in spoke)
            del sizes[name]
            sent.discard(name)
            spoke.discard(name)
        elif action == "x":
            queue.lose_rank()
            for name in set(sizes) - set(queue.queued_ids()):
                queue.leave(name)
                del sizes[name]
            assert not spoke & set(queue.queued_ids())
            sent.clear()
            spoke.clear()
            queue.hand_over_sequences = 4
        waiting = queue.queued_ids()
        assert len(waiting) == len(set(waiting)) == queue.queued_requests
        assert set(waiting) <= set(sizes)
        assert not spoke & set(waiting)
        assert set(sizes) - set(waiting) <= sent
        assert len(waiting) + queue.handed_requests == len(sizes)
        assert queue.queued_prompt_tokens == sum(sizes[name] for name in waiting)
        assert (queue.retry_after_s() or 0) > 0
