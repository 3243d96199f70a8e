"""How many sequences may run, how much prompt a step may take, and how long it may be put off.

A step reads each distinct expert once, however many rows use it, so larger batches read fewer
bytes a token and take longer. Before each step the sizer asks the model of step times
(`step_cost.py`) how far it may go. Three ways:

- "fixed": the bounds, whatever it takes.
- "dynamic": as many as wait, while the time per output token of all that run is predicted to hold.
  Prompt parts are as long as the decoding ones have time for. Where a waiting one's first token is
  at risk it goes first; where no size would do, throughput is what is left to look after.
- "frugal": also puts steps and prompts off, up to what objectives and deadlines leave to every
  sequence, so that more of them share what is read (`holding.py`).

Nothing is bounded before the model of step times is more than a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from core.objectives import ObjectiveSettings
from engine.expert_demand import ExpertDemand
from engine.holding import Holding
from engine.pacing import Pace
from engine.sequence import Sequence
from engine.step_cost import StepCost, StepFeatures
from engine.step_forecast import Look, SizeBounds, StepForecast

Batching = Literal["dynamic", "fixed", "frugal"]

_SAFETY = 0.95
"""Share of an objective that a prediction may fill."""
_LONGEST_STALL = 4.0
"""Most time, in objectives per token, that one step may take of a sequence's credit."""
_DEAR_PART = 1.5
"""A part of a prompt may cost so many times what its tokens cost in a full step. A short part reads
about as many experts as a long one, so it is better put off than cut."""
_GRAIN_TOKENS = 16
_PROMPT_RATE = 0.02


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """What the next step may be."""

    sequences: int
    """Most sequences that may run; never fewer than do."""
    prefill_tokens: int
    """Most prompt tokens of the step; 0 only where others decode."""
    hold_s: float
    """Seconds by which it may be put off."""
    reason: str
    """What bound it; see `core.step.BatchStats`."""


class BatchSizer:
    """Decides by the clock that stamped the sequences; learns from each step."""

    def __init__(
        self,
        batching: Batching,
        bounds: SizeBounds,
        objectives: ObjectiveSettings,
        cost: StepCost,
        demand: ExpertDemand,
        clock: Callable[[], float],
    ) -> None:
        self.cost = cost
        self._batching = batching
        self._bounds = bounds
        self._pace = Pace(objectives)
        self._forecast = StepForecast(cost, demand)
        self._holding = Holding(objectives, bounds, self._forecast)
        self._clock = clock
        self._prompt_s = 0.0
        """What prompt parts add to a step that decodes, on average."""

    @property
    def is_fixed(self) -> bool:
        """Whether nothing is decided at all."""
        return self._batching == "fixed"

    def arrived(self, finds_others: bool) -> None:
        """A request came, while others were here or not."""
        self._holding.arrived(finds_others)

    def learn(self, features: StepFeatures, step_s: float) -> None:
        """A step did this, took so long, and has just ended."""
        self._holding.stepped(self._clock(), features.decode_tokens)
        self._forecast.learn(features, step_s)
        decode = int(features.decode_tokens)
        if decode:
            alone_s = self._forecast.step_s(decode, 0, features.kv_tokens)
            more_s = max(0.0, step_s - alone_s) if features.prefill_tokens else 0.0
            more_s = min(more_s, _LONGEST_STALL * self._pace.tpot_s)
            self._prompt_s += _PROMPT_RATE * (more_s - self._prompt_s)

    def predict_s(self, decode_tokens: int, prefill_tokens: int, kv_tokens: float) -> float:
        """Seconds that a step is expected to take; 0 while too little is known."""
        if not self._forecast.known:
            return 0.0
        return self._forecast.step_s(decode_tokens, prefill_tokens, kv_tokens)

    def decide(
        self, running: list[Sequence], waiting: list[Sequence], blocked: bool = False
    ) -> BatchLimit:
        """The bounds of the next step. Changes nothing.

        `blocked`: the oldest waiting one found no KV blocks, so that nobody gains by waiting.
        """
        bounds = self._bounds
        if self.is_fixed or not self._forecast.known:
            reason = "bounds" if self.is_fixed else "probing"
            return BatchLimit(bounds.most, bounds.step_tokens, 0.0, reason)
        look = Look.at(self._clock(), running, waiting, bounds.step_tokens)
        allowed, reason = self._sequences(look)
        at_risk = self._at_risk(look)
        raised = min(bounds.most, look.running + at_risk)
        if raised > max(allowed, look.running):
            allowed, reason = raised, "ttft"
        urgent = at_risk > 0 or self._is_urgent(look)
        hold_s = 0.0
        if self._batching == "frugal" and self._holding.has_company and not (urgent or blocked):
            hold_s = self._holding.hold_s(look)
            if look.decoding and self._holding.gathers(look):
                return BatchLimit(look.running, bounds.step_tokens, hold_s, "gathering")
        prefill = self._prefill_tokens(look, urgent or reason == "throughput")
        if reason == "waiting" and allowed - look.running < len(look.waiting):
            reason = "bounds"
        return BatchLimit(max(allowed, look.running, 1), prefill, hold_s, reason)

    def _sequences(self, look: Look) -> tuple[int, str]:
        """The most sequences whose steps leave each its time per output token."""
        bounds = self._bounds
        each = look.kv_tokens / max(1, len(look.decoding))
        limit_s = _SAFETY * self._pace.tpot_s
        if self._forecast.step_s(1, 0, each) > limit_s:
            return bounds.most, "throughput"
        limit_s -= min(self._prompt_s, self._pace.tpot_s / 2)
        if self._forecast.step_s(bounds.most, 0, each * bounds.most) <= limit_s:
            return bounds.most, "waiting"
        fits = self._largest(
            bounds.fewest, bounds.most, lambda n: self._forecast.step_s(n, 0, each * n) <= limit_s
        )
        return fits, "tpot" if look.running + len(look.waiting) > fits else "waiting"

    def _at_risk(self, look: Look) -> int:
        """Waiting ones, up to the last whose first token comes late unless admitted now."""
        count = 0
        ahead = sum(sequence.pending for sequence in look.prefilling)
        next_s = self._forecast.with_prompts_s(look, 0)
        most = max(0, self._bounds.most - look.running)
        for number, sequence in enumerate(look.waiting[:most], start=1):
            ahead += sequence.pending
            needs_s = next_s + self._forecast.prompts_s(look, ahead) / _SAFETY
            if look.now_s + needs_s > self._pace.prompt_due_s(sequence, look.now_s):
                count = number
        return count

    def _is_urgent(self, look: Look) -> bool:
        """Whether a prompt under way comes late at less than full speed."""
        ahead = 0
        for sequence in look.prefilling:
            ahead += sequence.pending
            needs_s = self._forecast.prompts_s(look, ahead) / _SAFETY
            if look.now_s + needs_s > self._pace.prompt_due_s(sequence, look.now_s):
                return True
        return False

    def _prefill_tokens(self, look: Look, full: bool) -> int:
        """As many as the decoding ones have time for; none where a part would be too dear."""
        alone_s = self._forecast.with_prompts_s(look, 0)
        if full or not look.decoding or alone_s > self._pace.tpot_s:
            return look.room
        dues_s = [
            self._pace.next_due_s(sequence, look.now_s)
            for sequence in look.decoding
            if not self._pace.is_lost(sequence, look.now_s, alone_s)
        ]
        within_s = min(dues_s, default=math.inf) - look.now_s
        within_s = _SAFETY * min(within_s, _LONGEST_STALL * self._pace.tpot_s)
        full_s = self._forecast.with_prompts_s(look, look.room)
        if full_s <= within_s:
            return look.room
        grains = self._largest(
            0,
            -(-look.room // _GRAIN_TOKENS),
            lambda n: self._forecast.with_prompts_s(look, n * _GRAIN_TOKENS) <= within_s,
        )
        tokens = grains * _GRAIN_TOKENS
        dearest_s = _DEAR_PART * tokens / look.room * (full_s - alone_s)
        part_s = self._forecast.with_prompts_s(look, tokens) - alone_s
        return tokens if part_s <= dearest_s else 0

    @staticmethod
    def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
        """The largest number from `low` to below `high` that fits, else `low`."""
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return low
