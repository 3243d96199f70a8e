"""When tokens are due: what is left of the time that objectives and deadlines give a sequence."""

from __future__ import annotations

from core.objectives import ObjectiveSettings
from engine.sequence import Sequence

_WAIT_SHARE = 0.5
"""Share of the time to first token after which a prompt goes first; the rest is for those who come
in a burst."""


class Pace:
    """Objectives as points in time, in seconds of the clock that stamps the sequences."""

    def __init__(self, objectives: ObjectiveSettings, tpot_share: float = 1.0) -> None:
        """`tpot_share` of the time per token that the objectives give is what may be spent."""
        self.ttft_s = objectives.ttft_ms / 1e3
        self.tpot_s = tpot_share * objectives.tpot_ms / 1e3

    def prompt_due_s(self, sequence: Sequence, now_s: float) -> float:
        """When a prompt should have passed. One that is computed again is late already."""
        if sequence.first_token_s is not None:
            return now_s
        due_s = sequence.arrived_s + _WAIT_SHARE * self.ttft_s
        if sequence.deadline_s is None:
            return due_s
        left_s = self.tpot_s * self.left_tokens(sequence)
        return min(due_s, sequence.deadline_s - left_s)

    def next_due_s(self, sequence: Sequence, now_s: float) -> float:
        """When the next token must come, so that the mean time of all after the first holds.

        A sequence with a deadline is due earlier where only so it can say all it may say.
        """
        began_s = sequence.first_token_s
        if began_s is None:  # the last token of its prompt
            return sequence.arrived_s + self.ttft_s
        due_s = began_s + sequence.generated * self.tpot_s
        if sequence.deadline_s is None:
            return due_s
        return min(due_s, now_s + (sequence.deadline_s - now_s) / self.left_tokens(sequence))

    def is_lost(self, sequence: Sequence, now_s: float, step_s: float) -> bool:
        """Whether steps of `step_s` cannot bring its mean back within the objective."""
        late_s = now_s + step_s - self.next_due_s(sequence, now_s)
        gain_s = self.tpot_s - step_s
        return late_s > 0 and (gain_s <= 0 or late_s > gain_s * self.left_tokens(sequence))

    @staticmethod
    def left_tokens(sequence: Sequence) -> int:
        """Most tokens that it may still say, at least 1."""
        return max(1, sequence.request.params.max_tokens - sequence.generated)
