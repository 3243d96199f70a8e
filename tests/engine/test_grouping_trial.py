from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.grouping_trial import (
    FIRST_REST_TURNS,
    LEAST_GAIN,
    LONGEST_REST_TURNS,
    MEASURED_TURNS,
    Counts,
    GroupingTrial,
    saved_share,
)

PLACES = 4


@dataclass
class Traffic:
    """Always somebody waits; each admission is followed by some steps."""

    trial: GroupingTrial
    gain: float
    """Share of distinct experts that grouping really saves."""
    number: int = 0
    grouped: list[bool] = field(default_factory=list)

    def run(self, admissions: int) -> None:
        for _ in range(admissions):
            self.trial.admitted(self.number, self.number + 3)
            self.number += 1
            self.grouped.append(self.trial.groups)
            distinct = 1000 * (1 - self.gain) if self.trial.groups else 1000
            for _ in range(3):
                self.trial.stepped(PLACES, int(distinct))

    def until(self, state: str, most: int = 20000) -> int:
        for admissions in range(most):
            if self.trial.state == state:
                return admissions
            self.run(1)
        raise AssertionError(f"never {state}")


def test_it_goes_on_where_it_pays_and_looks_without_it_now_and_then() -> None:
    traffic = Traffic(GroupingTrial(PLACES), gain=0.1)
    assert traffic.trial.state == "probing"
    traffic.until("on")
    assert traffic.trial.gain == pytest.approx(0.1, abs=0.01)
    traffic.grouped.clear()
    traffic.run(3000)
    assert traffic.trial.state == "on"
    assert 0.8 < sum(traffic.grouped) / len(traffic.grouped) < 0.95


def test_it_stands_down_where_it_does_not_pay_and_rests_longer_each_time() -> None:
    traffic = Traffic(GroupingTrial(PLACES), gain=LEAST_GAIN / 2)
    rests = []
    for _ in range(3):
        traffic.until("off")
        assert not traffic.trial.groups
        rests.append(traffic.until("probing"))
    first = FIRST_REST_TURNS * PLACES
    assert rests == [first, 2 * first, 4 * first]
    assert 4 * FIRST_REST_TURNS < LONGEST_REST_TURNS


def test_it_stands_down_when_it_does_not_pay_any_more() -> None:
    traffic = Traffic(GroupingTrial(PLACES), gain=0.1)
    traffic.until("on")
    traffic.gain = -0.02
    traffic.until("off")
    traffic.gain = 0.1
    traffic.until("on")


def test_what_the_period_before_put_off_is_not_counted() -> None:
    trial = GroupingTrial(PLACES)
    assert trial.groups
    while trial.groups:
        trial.admitted(1, 2)
        trial.admitted(3, 4)
        trial.stepped(PLACES, 900)
    counted = trial._counts[False].sums
    trial.admitted(5, 20)  # those up to 20 waited when the period without it began
    for _ in range(50 * MEASURED_TURNS * PLACES):
        trial.admitted(20, 30)
        trial.stepped(PLACES, 1)
    assert not counted and not trial.groups
    for number in range(PLACES + 1):
        trial.admitted(21 + number, 40)
        assert not counted
        trial.stepped(PLACES, 1000)
    assert counted == {PLACES: [1000.0, 1.0]}


def test_always_means_always() -> None:
    traffic = Traffic(GroupingTrial(PLACES, always=True), gain=-1.0)
    traffic.run(5000)
    assert all(traffic.grouped) and traffic.trial.state == "on"


def test_only_steps_of_equal_size_are_compared() -> None:
    grouped, ungrouped = Counts(), Counts()
    grouped.add(4, 100)
    assert saved_share(grouped, ungrouped) is None
    ungrouped.add(8, 500)
    assert saved_share(grouped, ungrouped) is None
    ungrouped.add(4, 125)
    assert saved_share(grouped, ungrouped) == pytest.approx(0.2)
    grouped.add(8, 500)
    assert saved_share(grouped, ungrouped) == pytest.approx(25 / 625)
    grouped.fade(0.5)
    assert saved_share(grouped, ungrouped) == pytest.approx(25 / 625)
