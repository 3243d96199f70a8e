"""Log-probabilities of a prompt's own tokens, from the logits of the tokens before them.

They are the model's own, as in the sampler: log-softmax in fp32 of the raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from core.request import Request
from core.step import StepPlan, TokenLogprob

_LOGITS_BYTES = 128 * 1024**2
_LEAST_ROWS = 16
_ROWS_AT_ONCE = 64
"""Rows that are turned to fp32 log-probabilities together, which bounds the copies."""


def max_scored_tokens(vocab_size: int, value_bytes: int) -> int:
    """Prompt tokens of a step that may be scored: as many rows of logits as 128 MiB hold."""
    return max(_LEAST_ROWS, _LOGITS_BYTES // (vocab_size * value_bytes))


class StepLogits:
    """The logits [rows, V] of a step: of each part first the scored rows, then the sampled one."""

    def __init__(self, plan: StepPlan, logits: torch.Tensor) -> None:
        self._plan = plan
        self._logits = logits
        self._sampled: list[int] = []
        self._scored: dict[int, tuple[int, int]] = {}
        row = 0
        for number, part in enumerate(plan.parts):
            count = part.scored[1] - part.scored[0]
            if count:
                self._scored[number] = (row, row + count)
            row += count
            if part.wants_logits:
                self._sampled.append(row)
                row += 1

    @property
    def sampled(self) -> torch.Tensor:
        """[parts with wants_logits, V], in the order of the parts."""
        return self._logits[self._sampled] if self._scored else self._logits

    def scores(self, requests: Seq[Request]) -> dict[int, tuple[TokenLogprob, ...] | None]:
        """By number of the part, the log-probability of the token after each of its scored rows.

        `requests` are those of the parts. None where a row is not finite.
        """
        found = {}
        for number in self._scored:
            request, (begin, end) = requests[number], self._plan.parts[number].scored
            next_ids = request.prompt_ids[begin + 1 : end + 1]
            found[number] = self._score(number, next_ids, request.params.prompt_logprobs or 0)
        return found

    def _score(self, part: int, next_ids: Seq[int], count: int) -> tuple[TokenLogprob, ...] | None:
        begin, end = self._scored[part]
        found: list[TokenLogprob] = []
        for first in range(begin, end, _ROWS_AT_ONCE):
            rows = self._logits[first : min(first + _ROWS_AT_ONCE, end)].float().log_softmax(-1)
            if rows.isnan().any():
                return None
            ids = next_ids[len(found) : len(found) + len(rows)]
            own = rows.gather(1, torch.tensor(ids, device=rows.device)[:, None])[:, 0].tolist()
            values, tokens = (x.tolist() for x in rows.topk(min(count, rows.shape[-1])))
            found += [
                TokenLogprob(logprob, tuple(zip(*top, strict=True)))
                for logprob, *top in zip(own, tokens, values, strict=True)
            ]
        return tuple(found)
