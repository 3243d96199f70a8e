"""Does admission by overlap pay? Periods with and without it, and how many experts steps used.

A period begins when those who waited before it have been admitted and the batch has turned over
once: what the period before put off would else be counted for it. Steps are compared with steps of
as many sequences. Plain numbers in, plain decisions out; no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

GroupingState = Literal["off", "probing", "on"]

MEASURED_TURNS: Final = 4
"""Length of a period that counts, in batches of admissions that had a choice."""
FIRST_REST_TURNS: Final = 32
"""Batches of such admissions between standing down and the next probe; doubled each time that a
probe fails."""
LONGEST_REST_TURNS: Final = 2048
LEAST_GAIN: Final = 0.02
"""Share of distinct experts that grouping must save."""
_PROBE: Final = (True, False, False, True)
_REVIEW: Final = (True, True, True, True, True, True, False)
_KEPT: Final = 0.5
"""Of what was counted before, at each verdict."""


@dataclass(slots=True)
class Counts:
    """By number of sequences: distinct experts of all steps, and the steps."""

    sums: dict[int, list[float]] = field(default_factory=dict)

    def add(self, sequences: int, distinct: int) -> None:
        """One step."""
        entry = self.sums.setdefault(sequences, [0.0, 0.0])
        entry[0] += distinct
        entry[1] += 1.0

    def fade(self, kept: float) -> None:
        """What was counted so far weighs less."""
        for entry in self.sums.values():
            entry[0] *= kept
            entry[1] *= kept


def saved_share(grouped: Counts, ungrouped: Counts) -> float | None:
    """Share of distinct experts that steps of equal size used less; None if none are equal."""
    with_it = without = 0.0
    for sequences, (distinct, steps) in grouped.sums.items():
        other, other_steps = ungrouped.sums.get(sequences, (0.0, 0.0))
        weight = min(steps, other_steps)
        if weight > 0:
            with_it += weight * distinct / steps
            without += weight * other / other_steps
    return 1.0 - with_it / without if without > 0 else None


class GroupingTrial:
    """Probing, on or off: grouping stands down where it does not pay, and tries again later.

    probing -> on, or off; on -> probing when a review finds that it does not pay any more; off ->
    probing after a rest that doubles with each failed probe.
    """

    def __init__(self, sequences: int, always: bool = False) -> None:
        """`sequences` run at once. `always`: never without, whatever is found."""
        self.state: GroupingState = "on" if always else "probing"
        self.gain = 0.0
        """Share of distinct experts saved, as last measured; 0 before."""
        self._sequences = max(1, sequences)
        self._always = always
        self._rest = FIRST_REST_TURNS
        self._periods: tuple[bool, ...] = _PROBE
        self._period = 0
        self._counts = {True: Counts(), False: Counts()}
        self._fence: int | None = None
        self._fence_passed = False
        self._admissions = 0

    @property
    def groups(self) -> bool:
        """Whether the next admission goes by overlap."""
        if self._always:
            return True
        return self.state != "off" and self._periods[self._period]

    def admitted(self, oldest: int, newest: int) -> None:
        """One of several who waited was admitted; the ids of the oldest and newest of them."""
        if self._always:
            return
        if self.state == "off":
            self._admissions += 1
            if self._admissions >= self._rest * self._sequences:
                self._rest = min(2 * self._rest, LONGEST_REST_TURNS)
                self._enter("probing")
            return
        if self._fence is None:
            self._fence = newest
        if not self._fence_passed:
            self._fence_passed = oldest > self._fence
            return
        self._admissions += 1
        if self._admissions >= (1 + MEASURED_TURNS) * self._sequences:
            self._end_period()

    def stepped(self, sequences: int, distinct: int) -> None:
        """A step of so many sequences, one token each, that mostly came by choice."""
        if not self._always and self.state != "off" and self._admissions >= self._sequences:
            self._counts[self.groups].add(sequences, distinct)

    def _end_period(self) -> None:
        self._begin_period()
        self._period += 1
        if self._period < len(self._periods):
            return
        found = saved_share(self._counts[True], self._counts[False])
        self.gain = found or 0.0
        if self.gain >= LEAST_GAIN:
            self._rest = FIRST_REST_TURNS
            self._enter("on")
        else:
            self._enter("probing" if self.state == "on" else "off")

    def _enter(self, state: GroupingState) -> None:
        if state == "on":
            for counts in self._counts.values():
                counts.fade(_KEPT)
        else:
            self._counts = {True: Counts(), False: Counts()}
        self.state = state
        self._periods = _REVIEW if state == "on" else _PROBE
        self._period = 0
        self._begin_period()

    def _begin_period(self) -> None:
        self._fence, self._fence_passed, self._admissions = None, False, 0
