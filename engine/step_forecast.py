"""What a step not planned yet would take: expected experts, then the model of step times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.expert_demand import ExpertDemand
from engine.sequence import Sequence
from engine.step_cost import StepCost, StepFeatures


@dataclass(frozen=True, slots=True)
class SizeBounds:
    """Within which sizes are chosen."""

    fewest: int
    """Sequences that may run whatever objectives say."""
    most: int
    """Sequences that may run at all."""
    step_tokens: int
    """Tokens of a step at all."""


@dataclass(frozen=True, slots=True)
class Look:
    """The sequences that a decision is about."""

    now_s: float
    running: int
    decoding: list[Sequence]
    held: list[Sequence]
    """They would decode, but wait for what their structure allows."""
    prefilling: list[Sequence]
    waiting: list[Sequence]
    """Those that could be admitted."""
    kv_tokens: int
    """Of the decoding ones."""
    room: int
    """Prompt tokens that fit the step."""

    @classmethod
    def at(
        cls, now_s: float, running: list[Sequence], waiting: list[Sequence], step_tokens: int
    ) -> Look:
        """Sorts what runs and waits."""
        decoding = [s for s in running if s.pending == 1 and not s.held]
        return cls(
            now_s,
            len(running),
            decoding,
            [s for s in running if s.held],
            [s for s in running if s.pending > 1 and not s.held],
            [s for s in waiting if not (s.held or s.waits_for_leader)],
            sum(len(s.token_ids) for s in decoding),
            max(1, step_tokens - len(decoding)),
        )


class StepForecast:
    """Learns from each step."""

    def __init__(self, cost: StepCost, demand: ExpertDemand) -> None:
        self.cost = cost
        self.demand = demand

    @property
    def known(self) -> bool:
        """Whether it is more than a guess."""
        return self.cost.known

    @property
    def margin(self) -> float:
        """What a time is multiplied by to be rarely exceeded."""
        return 1.0 + max(0.1, 2.0 * min(self.cost.error, 0.5))

    def learn(self, features: StepFeatures, step_s: float) -> None:
        """A step did this and took so long."""
        self.demand.learn(
            int(features.decode_tokens),
            int(features.prefill_tokens),
            int(features.experts),
            int(features.missing),
        )
        self.cost.learn(features, step_s)

    def step_s(self, decode_tokens: int, prefill_tokens: int, kv_tokens: float) -> float:
        """Seconds of a step of so many tokens."""
        experts = self.demand.distinct(decode_tokens, prefill_tokens)
        missing = self.demand.missing(experts)
        return self.cost.predict_s(
            StepFeatures(decode_tokens, prefill_tokens, experts, missing, kv_tokens)
        )

    def with_prompts_s(self, look: Look, prefill_tokens: int) -> float:
        """Seconds of the next step, if it takes so many prompt tokens beside those that decode."""
        return self.step_s(len(look.decoding), prefill_tokens, look.kv_tokens + prefill_tokens)

    def prompts_s(self, look: Look, prompt_tokens: int) -> float:
        """Seconds until so many prompt tokens have passed, at full speed."""
        steps, rest = divmod(prompt_tokens, look.room)
        rest_s = self.with_prompts_s(look, rest) if rest else 0.0
        return rest_s + steps * self.with_prompts_s(look, look.room)

    def slack_s(self, look: Look, sequences: list[Sequence], dues_s: list[float]) -> float:
        """Time for which these prompts, in this order, can be put off; negative: some come late."""
        ahead, slack_s = 0, math.inf
        for sequence, due_s in zip(sequences, dues_s, strict=True):
            ahead += sequence.pending
            needs_s = self.prompts_s(look, ahead) * self.margin
            slack_s = min(slack_s, due_s - look.now_s - needs_s)
        return slack_s
