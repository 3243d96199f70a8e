"""Prefetch stands down where it does not pay, and tries again."""

import pytest

from expert_pool.payoff import (
    FIRST_REST_PASSES,
    LONGEST_REST_PASSES,
    PROBE_PASSES,
    REVIEW_PASSES,
    Payoff,
    ReadTimes,
)


def run(payoff, passes, hidden_s=0.0, harm_s=0.0, wasted=0, other=100):
    """So many passes of a millisecond each."""
    for _ in range(passes):
        payoff.window.busy_s += 1e-3
        payoff.window.hidden_s += hidden_s
        payoff.window.harm_s += harm_s
        payoff.window.wasted_bytes += wasted
        payoff.window.other_bytes += other
        payoff.pass_ended()


def test_a_probe_that_pays_turns_it_on_and_reviews_keep_it_on():
    payoff = Payoff()
    assert payoff.state == "probing"
    run(payoff, PROBE_PASSES - 1, hidden_s=1e-4)
    assert payoff.state == "probing"
    run(payoff, 1, hidden_s=1e-4)
    assert payoff.state == "on"
    assert payoff.last_gain == pytest.approx(0.1)
    run(payoff, 5 * REVIEW_PASSES, hidden_s=1e-4, harm_s=5e-5)
    assert payoff.state == "on"


@pytest.mark.parametrize(
    "what", [{}, {"hidden_s": 1e-4, "harm_s": 1e-4}, {"hidden_s": 1e-4, "wasted": 16}]
)
def test_what_does_not_pay_ends_after_two_looks(what):
    payoff = Payoff()
    run(payoff, PROBE_PASSES, hidden_s=1e-4)
    run(payoff, REVIEW_PASSES, **what)
    assert payoff.state == "probing"
    run(payoff, PROBE_PASSES, **what)
    assert payoff.state == "off"


def test_rests_grow_up_to_a_bound_and_start_anew_when_it_paid():
    payoff, rests = Payoff(), []
    for _ in range(9):
        run(payoff, PROBE_PASSES)
        rest = 0
        while payoff.state == "off":
            run(payoff, 1)
            rest += 1
        rests.append(rest)
    assert rests[:3] == [FIRST_REST_PASSES, 2 * FIRST_REST_PASSES, 4 * FIRST_REST_PASSES]
    assert rests[-1] == LONGEST_REST_PASSES
    run(payoff, PROBE_PASSES, hidden_s=1e-4)
    run(payoff, REVIEW_PASSES)
    run(payoff, PROBE_PASSES)
    assert payoff.state == "off"
    run(payoff, FIRST_REST_PASSES)
    assert payoff.state == "probing"


def test_always_never_stands_down():
    payoff = Payoff(always=True)
    run(payoff, 10 * REVIEW_PASSES, harm_s=1.0, wasted=1000)
    assert payoff.state == "on"
    assert payoff.last_gain < 0


def test_read_times_find_latency_and_pace():
    times = ReadTimes()
    assert times.seconds(3) == 0 and times.pace_s == 0 and not times.known
    for number in (1, 4, 2, 3) * 20:
        times.add(number, 0.002 + 0.001 * number)
    assert times.pace_s == pytest.approx(0.001)
    assert times.seconds(0) == 0
    assert times.seconds(5) == pytest.approx(0.007)


def test_read_times_of_one_width_are_shared_out_evenly():
    times = ReadTimes()
    for _ in range(100):
        times.add(2, 0.006)
    assert times.pace_s == pytest.approx(0.003)
    assert times.seconds(4) == pytest.approx(0.012)


def test_a_pace_is_never_negative():
    times = ReadTimes()
    for number, seconds in ((1, 0.010), (4, 0.002)) * 10:
        times.add(number, seconds)
    assert times.pace_s == 0
    assert times.seconds(9) > 0
