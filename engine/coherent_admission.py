"""Who of the waiting is admitted next: the one whose experts the running ones use already.

A step reads each expert that its sequences use once, so sequences that use the same ones make
steps cheaper. Nobody pays for that with more than a bounded wait: a sequence is overtaken by
younger ones at most so many times. docs/grouping.md tells more.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Final, Literal, Protocol

import numpy as np

from engine.grouping_trial import GroupingState, GroupingTrial
from engine.overlap import Member, Overlap, SignatureOf
from engine.settings import WAITING_LOOKED_AT

Grouping = Literal["auto", "off", "on"]

AT_RISK: Final = 0.75
"""Part of the time until its first token is due that the oldest may wait before it goes first."""
_AGED: Final = 0.3
"""What a candidate adds counts for so much less, in part, as it has been overtaken the more: who
has to go soon anyway goes together with its like."""
_TIE: Final = 0.005
"""Candidates whose costs differ by less go in order of arrival."""


class Candidate(Member, Protocol):
    """A sequence that waits; `arrived_s` and `deadline_s` are of the order's clock."""

    arrived_s: float
    deadline_s: float | None

    @property
    def generated(self) -> int:
        """Above 0 for one that ran before and was sent back."""


class AdmissionOrder:
    """Not thread-safe. Its counts live until `left` is called for a sequence."""

    def __init__(
        self,
        signature: SignatureOf,
        max_overtakes: int,
        clock: Callable[[], float],
        grouping: Grouping = "auto",
        ttft_s: float | None = None,
        batch_sequences: int = 1,
    ) -> None:
        """`signature`: see `Overlap`. `ttft_s`: time to first token that is to be met, if any.
        `batch_sequences` run at once."""
        self._overlap = Overlap(signature)
        self._max_overtakes = max_overtakes
        self._clock = clock
        self._off = grouping == "off"
        self._ttft_s = ttft_s
        self._trial = GroupingTrial(batch_sequences, always=grouping == "on")
        self._overtaken: dict[int, int] = {}
        self._by_choice: set[int] = set()
        self._overtaken_now = 0

    @property
    def state(self) -> GroupingState:
        """Whether it goes by overlap: on trial, because it pays, or not."""
        return "off" if self._off else self._trial.state

    @property
    def gain(self) -> float:
        """Share of distinct experts that it saves, as last measured; 0 before."""
        return 0.0 if self._off else self._trial.gain

    def overtaken(self, sequence_id: int) -> int:
        """How often younger ones have been admitted before a sequence."""
        return self._overtaken.get(sequence_id, 0)

    def take_overtaken(self) -> int:
        """Overtakings since the last call."""
        number, self._overtaken_now = self._overtaken_now, 0
        return number

    def pick(self, waiting: Ordered[Candidate], running: Ordered[Member]) -> int:
        """Index of who of the `waiting`, oldest first, is admitted next; changes no count.

        First who must not be overtaken again, then who ran before, then who shares its prompt
        with a running one; then interactive requests before batch ones, and of these, while
        grouping, the oldest if it might else miss its first token's time, else who adds least.
        """
        if self._off or len(waiting) == 1:
            return 0
        requests = {member.request.request_id for member in running}
        rules: tuple[Callable[[Candidate], bool], ...] = (
            lambda member: self.overtaken(member.sequence_id) >= self._max_overtakes,
            lambda member: member.generated > 0,
            lambda member: member.request.request_id in requests,
        )
        for rule in rules:
            for at, member in enumerate(waiting):
                if rule(member):
                    return at
        places = _first_in_priority(waiting)
        if not self._trial.groups or len(places) == 1 or not running:
            return places[0]
        places = places[:WAITING_LOOKED_AT]
        if self._is_at_risk(waiting[places[0]]):
            return places[0]
        candidates = [waiting[at] for at in places]
        ages = [self.overtaken(member.sequence_id) for member in candidates]
        weights = 1.0 - _AGED * np.array(ages) / max(1, self._max_overtakes)
        costs = weights * self._overlap.added(candidates, running)
        return places[int(np.argmax(costs <= costs.min() + _TIE))]

    def admitted(self, chosen: Candidate, waiting: Ordered[Candidate]) -> None:
        """One of the `waiting` as given to `pick` was admitted: those older were overtaken."""
        for member in waiting:
            if member.sequence_id < chosen.sequence_id:
                number = member.sequence_id
                self._overtaken[number] = self._overtaken.get(number, 0) + 1
                self._overtaken_now += 1
        if self._off or len(waiting) < 2:
            self._by_choice.discard(chosen.sequence_id)
            return
        self._by_choice.add(chosen.sequence_id)
        self._trial.admitted(waiting[0].sequence_id, waiting[-1].sequence_id)

    def stepped(self, members: Ordered[Member], tokens: int, distinct: int) -> None:
        """A step of these sequences is over: `tokens` passed, and `distinct` (layer, expert)
        were asked for. Steps with prompts in them say nothing, and are left out."""
        if self._off or tokens != len(members) or tokens < 2:
            return
        chosen = sum(member.sequence_id in self._by_choice for member in members)
        if 2 * chosen >= tokens:
            self._trial.stepped(tokens, distinct)

    def left(self, sequence_id: int) -> None:
        """A sequence has ended, wherever it was."""
        self._overlap.forget(sequence_id)
        self._overtaken.pop(sequence_id, None)
        self._by_choice.discard(sequence_id)

    def _is_at_risk(self, member: Candidate) -> bool:
        """Whether much of its time is over, but not all: who is late already is no later for it."""
        now_s = self._clock()
        due_s = [] if self._ttft_s is None else [member.arrived_s + self._ttft_s]
        if member.deadline_s is not None:
            due_s.append(member.deadline_s)
        return any(
            member.arrived_s + AT_RISK * (due - member.arrived_s) <= now_s < due for due in due_s
        )


def _first_in_priority(waiting: Ordered[Candidate]) -> list[int]:
    """Places of the interactive ones, or of all where there is none."""
    interactive = [at for at, m in enumerate(waiting) if m.request.priority == "interactive"]
    return interactive or list(range(len(waiting)))
