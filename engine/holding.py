"""How long steps and prompts are put off on purpose, so that more sequences share a step.

Only "frugal" batching does that. What is spent is what the objectives leave: the time per token of
those that decode, with a full prompt part kept in reserve, and half of the time to first token.
Nothing is put off where nobody would come, where places run out, or where a prompt is late.
"""

from __future__ import annotations

from core.objectives import ObjectiveSettings
from engine.pacing import Pace
from engine.step_forecast import Look, SizeBounds, StepForecast

_SHARE = 0.9
"""Share of the time per token that may be spent."""
_COMPANY_RATE = 0.1
_LEAST_COMPANY = 0.1
"""Share of requests that find others here, below which nobody is put off."""
_ALL_BELOW, _NONE_FROM = 0.4, 0.7
"""Shares of the sequences that may run: below the first all slack is spent, from the second on
none, so that those who come in a burst find places."""
_LONGEST_S = 60.0
"""A step is put off no longer, whatever the objectives leave."""
_FULL = 0.9
_FULL_RATE = 1 / 400
_FULL_AT_MOST = 0.1
"""Share of the last steps in which about every place was taken, from which on nothing is put off.
"""


class Holding:
    """Decides on a look at the sequences; remembers who came, and whether places ran out."""

    def __init__(
        self, objectives: ObjectiveSettings, bounds: SizeBounds, forecast: StepForecast
    ) -> None:
        self._pace = Pace(objectives, _SHARE)
        self._bounds = bounds
        self._forecast = forecast
        self._company = 0.0
        self._full = 0.0
        self._stepped_s = 0.0
        """When the last step ended."""

    @property
    def has_company(self) -> bool:
        """Whether others come while somebody is here."""
        return self._company >= _LEAST_COMPANY

    def arrived(self, finds_others: bool) -> None:
        """A request came, while others were here or not."""
        self._company += _COMPANY_RATE * (finds_others - self._company)

    def stepped(self, now_s: float, decode_tokens: float) -> None:
        """A step ended, in which so many sequences decoded."""
        self._stepped_s = now_s
        is_full = decode_tokens >= _FULL * self._bounds.most
        self._full += _FULL_RATE * (is_full - self._full)

    def gathers(self, look: Look) -> bool:
        """Whether the waiting ones can wait for company, until another step has run if one can."""
        if not look.waiting or look.prefilling or (look.held and not look.decoding):
            return False
        if look.running + len(look.waiting) >= self._bounds.most:
            return False
        if sum(sequence.pending for sequence in look.waiting) >= look.room:
            return False
        return self._prompt_slack_s(look) > (self._pace.tpot_s if look.decoding else 0.0)

    def hold_s(self, look: Look) -> float:
        """Seconds by which the next step may be put off: slack of the tightest sequence."""
        if not look.decoding:
            gathers = self.gathers(look)
            return min(max(0.0, self._prompt_slack_s(look)), _LONGEST_S) if gathers else 0.0
        share = self._spent_share(look)
        if share <= 0.0:
            return 0.0  # also where a long queue would take long to look at
        step_s = self._forecast.with_prompts_s(look, look.room) * self._forecast.margin
        # What a sequence was given too early does not pay for a longer pause now.
        due_s = self._stepped_s + self._pace.tpot_s
        for sequence in (*look.decoding, *look.held):
            due_s = min(due_s, self._pace.next_due_s(sequence, look.now_s))
        # Of the whole pause, however often it is asked for anew.
        begun_s = look.now_s - self._stepped_s
        pause_s = begun_s + min(self._prompt_slack_s(look), due_s - look.now_s - step_s)
        return min(max(0.0, share * pause_s - begun_s), _LONGEST_S)

    def _prompt_slack_s(self, look: Look) -> float:
        prompts = [*look.prefilling, *look.waiting]
        dues_s = [self._pace.prompt_due_s(sequence, look.now_s) for sequence in prompts]
        return self._forecast.slack_s(look, prompts, dues_s)

    def _spent_share(self, look: Look) -> float:
        used = (look.running + len(look.waiting)) / self._bounds.most
        by_places = min(1.0, max(0.0, (_NONE_FROM - used) / (_NONE_FROM - _ALL_BELOW)))
        return by_places * max(0.0, 1.0 - self._full / _FULL_AT_MOST)
