"""From logits to tokens: each sequence draws by its own random numbers, whoever shares the batch.

Order of application, as in SamplingParams: logit_bias, penalties, min_tokens mask, temperature,
top_k, top_p, min_p. Log-probabilities are the model's own: log-softmax of the raw logits, before
bias, penalties and temperature. A structure's mask comes with the min_tokens mask.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from core.request import SamplingParams
from core.step import TokenLogprob

_CANDIDATES = 256
"""Likeliest tokens that top_p looks at first; a flatter distribution is sorted whole."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sequence's next token."""

    token_id: int
    logprob: TokenLogprob | None = None


class SamplingState:
    """What sampling remembers of one sequence."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Seq[int],
        end_ids: Seq[int],
        seed: Seq[int],
    ) -> None:
        """`end_ids` end the sequence; they are masked until min_tokens. `seed` is its entropy."""
        self.params = params
        self.generated = 0
        self.end_ids = tuple(sorted(set(end_ids)))
        self.forbidden: torch.Tensor | None = None
        """[V] bool: what its structure does not allow next; None without a structure."""
        self._end_ids = torch.tensor(self.end_ids, dtype=torch.long)
        self._random = np.random.Generator(np.random.PCG64(list(seed)))
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)
        self._counts: dict[int, int] = {}
        """How often each token was generated, kept where a penalty needs it."""
        self._prompt = set(prompt_ids) if params.repetition_penalty != 1.0 else set()
        self._penalised = (
            params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.repetition_penalty != 1.0
        )

    @property
    def edits_logits(self) -> bool:
        """Whether its logits change before temperature."""
        plain = not len(self._bias_ids) and not self._penalised and self.forbidden is None
        return not plain or self._masks_end

    @property
    def _masks_end(self) -> bool:
        return self.generated < self.params.min_tokens and len(self._end_ids) > 0

    def uniform(self) -> float:
        """Its next random number in [0, 1): one for each token that is not greedy."""
        return float(self._random.random())

    def accept(self, token_id: int) -> None:
        """Remembers a token that became part of the sequence."""
        self.generated += 1
        if self._penalised:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def edit(self, logits: torch.Tensor) -> None:
        """Applies bias, penalties and the min_tokens mask to its row [V] in place (fp32)."""
        device = logits.device
        if len(self._bias_ids):
            logits[self._bias_ids.to(device)] += self._bias.to(device)
        if self._penalised:
            self._penalise(logits)
        if self._masks_end:
            logits[self._end_ids.to(device)] = -torch.inf
        if self.forbidden is not None:
            logits.masked_fill_(self.forbidden.to(device), -torch.inf)

    def _penalise(self, logits: torch.Tensor) -> None:
        params, device = self.params, logits.device
        if params.repetition_penalty != 1.0 and (seen := self._prompt | self._counts.keys()):
            ids = torch.tensor(sorted(seen), dtype=torch.long, device=device)
            values = logits[ids]
            factor = params.repetition_penalty
            logits[ids] = torch.where(values > 0, values / factor, values * factor)
        if self._counts:
            ids = torch.tensor(list(self._counts), dtype=torch.long, device=device)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=device)
            logits[ids] -= params.presence_penalty + params.frequency_penalty * counts


def sample(logits: torch.Tensor, states: Seq[SamplingState]) -> list[Sampled | None]:
    """The next token of each row of `logits` [n, V]; None where the row is not finite.

    A row may hold -inf (an impossible token); NaN, +inf, or nothing possible is a fault.
    """
    best, greedy = logits.max(dim=-1)
    fine = torch.isfinite(best).tolist()
    tokens: list[int] = greedy.tolist()
    edited = [i for i, state in enumerate(states) if fine[i] and state.edits_logits]
    drawn = [i for i, state in enumerate(states) if fine[i] and state.params.temperature > 0]
    work = {}
    for i in edited:
        row = logits[i].to(torch.float32, copy=True)
        states[i].edit(row)
        work[i] = row
        tokens[i] = int(row.argmax())
        fine[i] = bool(row[tokens[i]].isfinite())
    drawn = [i for i in drawn if fine[i]]
    if drawn:
        rows = torch.stack([work[i] if i in work else logits[i].float() for i in drawn])
        for i, token in zip(drawn, _draw(rows, [states[i] for i in drawn]), strict=True):
            tokens[i] = token
    asked = [i for i, s in enumerate(states) if fine[i] and s.params.logprobs is not None]
    logprobs = _logprobs(logits, asked, tokens, states)
    return [Sampled(tokens[i], logprobs.get(i)) if fine[i] else None for i in range(len(states))]


def _draw(logits: torch.Tensor, states: Seq[SamplingState]) -> list[int]:
    """One token a row by inverse transform sampling, after temperature, top_k, top_p, min_p."""
    params = [state.params for state in states]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # In double precision: a cumulative sum over a large vocabulary would lose its tail in fp32.
    temperature = column([max(p.temperature, 1e-5) for p in params])
    scaled = (logits.double() - logits.amax(-1, keepdim=True).double()) / temperature
    probs = scaled.softmax(-1)
    limited = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    for i in limited:
        probs[i] = _limit(probs[i], params[i].top_k, params[i].top_p)
    if any(p.min_p > 0 for p in params):
        floor = probs.amax(-1, keepdim=True) * column([p.min_p for p in params])
        probs = probs.masked_fill(probs < floor, 0.0)
    cumulative = probs.cumsum(-1)
    target = column([state.uniform() for state in states]) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # A target that rounds up to the total would fall behind the last possible token.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.uint8).argmax(-1)
    tokens: list[int] = torch.minimum(found, last).tolist()
    return tokens


def _limit(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The row [V] with zeros outside the top_k likeliest and the top_p nucleus of what is left.

    The nucleus is the smallest set of likeliest tokens whose share reaches top_p.
    """
    size = probs.shape[-1]
    values, ids = probs.topk(min(top_k or _CANDIDATES, size))
    if top_p < 1.0:
        total = values.sum() if top_k else probs.sum()
        if top_k == 0 and float(values.sum()) < top_p * float(total):
            values, ids = probs.sort(descending=True)
        inside = values.cumsum(-1) - values < top_p * total
        values, ids = values[inside], ids[inside]
    out = torch.zeros_like(probs)
    out[ids] = values
    return out


def _logprobs(
    logits: torch.Tensor, asked: list[int], tokens: list[int], states: Seq[SamplingState]
) -> dict[int, TokenLogprob]:
    if not asked:
        return {}
    rows = logits[asked].float().log_softmax(-1)
    chosen = rows.gather(1, torch.tensor([[tokens[i]] for i in asked], device=logits.device))
    most = max(states[i].params.logprobs or 0 for i in asked)
    values, ids = rows.topk(min(most, rows.shape[-1]))
    found = {}
    for line, i in enumerate(asked):
        count = states[i].params.logprobs or 0
        pairs = zip(ids[line, :count].tolist(), values[line, :count].tolist(), strict=True)
        found[i] = TokenLogprob(float(chosen[line, 0]), tuple(pairs))
    return found
