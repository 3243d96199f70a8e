"""How busy a group of replicas is, and whether it answers. Plain; the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable

SHUNNED_S = 5.0
"""How long a group that failed is left alone where another one can serve."""
TRIAL_PROMPTS = 16
"""Prompts a replica that others have to be ahead by before a group on trial gets a second one: an
answer may just be long."""


class GroupLoad:
    """What one gateway has under way in a group, from when its place is chosen until it ends.

    A group that has not answered yet, or failed since, is on trial: one request at a time finds
    out, while another group can serve the others.
    """

    def __init__(self, replicas: int, clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self._clock = clock
        self._shunned_until_s = clock()
        self._on_trial = True
        self._prompts = 0
        self._trials = 0

    @property
    def prompts(self) -> int:
        """Under way now."""
        return self._prompts

    @property
    def reluctance(self) -> tuple[bool, float]:
        """The less, the better a choice: whether to leave it alone, then prompts a replica."""
        awaited = TRIAL_PROMPTS if self._on_trial and self._trials else 0
        return self._clock() < self._shunned_until_s, self._prompts / self._replicas + awaited

    def begin(self, prompts: int) -> Visit:
        """So many prompts of one request are under way here."""
        return Visit(self, prompts, self._on_trial)

    def answered(self) -> None:
        """A replica could answer."""
        self._on_trial = False

    def failed(self) -> None:
        """No replica could answer, or one was lost."""
        self._on_trial = True
        self._shunned_until_s = self._clock() + SHUNNED_S

    def change(self, prompts: int, trials: int) -> None:
        """For `Visit`: so many more are under way."""
        self._prompts += prompts
        self._trials += trials


class Visit:
    """One request's stay in a group."""

    def __init__(self, load: GroupLoad, prompts: int, is_trial: bool) -> None:
        self.load = load
        self._prompts = prompts
        self._trials = int(is_trial)
        load.change(prompts, self._trials)

    def end(self) -> None:
        """It is over, whatever came of it; may be repeated."""
        self.load.change(-self._prompts, -self._trials)
        self._prompts = self._trials = 0
