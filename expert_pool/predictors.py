"""Which experts will be asked for next, before the router says so; and how often that was right.

Every predictor gives scores over the experts of a layer; a budget takes the highest. The next
layer's own gate, applied to the present hidden state, needs the model: see next_gate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from expert_pool.popularity import Popularity
from expert_pool.tables import IntArray

Scores = npt.NDArray[np.float64]

HALF_LIFE_TOKENS: Final = 4096.0
CONTEXT_ROWS: Final = 128
"""Experts of a layer that each have a row of transition counts, one byte an expert."""
SHARED_CONTEXT_ROWS: Final = 48
"""Rows where a layer has more experts than that: several experts share one."""
PROMPT_BYTES: Final = 256 * 1024
"""Memory of a PromptPredictor; it sets how many rows token ids share."""
MAX_PROMPT_BUCKETS: Final = 1024
PROMPT_FIRST_TOKENS: Final = 32
"""Only so many first ids of a prompt are looked at."""
_RAREST_IDS: Final = 16
"""They say most of a prompt, and bound what `predict_all` costs."""
_PROMPTS_HALVED_AT: Final = 512.0


class TransitionPredictor:
    """The experts of a later layer from a layer's own, by how often they were chosen together.

    The later layer is the next one, or whichever is always meant; the last layer has one too: a
    layer of the next step.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._rows = num_experts if num_experts <= CONTEXT_ROWS else SHARED_CONTEXT_ROWS
        self._num_experts = num_experts
        self._counts: npt.NDArray[np.uint8] = np.zeros(
            (num_layers, self._rows, num_experts), np.uint8
        )
        self._uses: npt.NDArray[np.float32] = np.zeros((num_layers, self._rows), np.float32)
        self._next_uses: npt.NDArray[np.float32] = np.zeros((num_layers, num_experts), np.float32)
        self._tokens = np.zeros(num_layers)
        self._calls = np.zeros(num_layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._counts.nbytes + self._uses.nbytes + self._next_uses.nbytes

    def learn(self, layer: int, experts: IntArray, next_experts: IntArray, tokens: int = 1) -> None:
        """`tokens` chose `experts` in `layer` and `next_experts` in the later one.

        A step of one token says most; in a batch each pair of experts counts once.
        """
        if not experts.size or not next_experts.size:
            return
        rows = self._rows_of(experts)
        table = self._counts[layer]
        at = np.ix_(rows, next_experts)
        counts = table[at]
        counts += 1
        table[at] = counts
        self._uses[layer][rows] += 1.0
        if counts.max() == 255:
            # A row that is full forgets half: its older uses count less and less.
            full = rows[counts.max(axis=1) == 255]
            table[full] >>= 1
            self._uses[layer][full] *= 0.5
        self._next_uses[layer][next_experts] += 1.0
        self._calls[layer] += 1.0
        self._tokens[layer] += tokens
        if self._tokens[layer] >= HALF_LIFE_TOKENS:
            self._next_uses[layer] *= 0.5
            self._calls[layer] *= 0.5
            self._tokens[layer] = 0.0

    def predict(self, layer: int, experts: IntArray) -> Scores:
        """Scores of the later layer's experts, where `layer` chose `experts`.

        The mean over them of P(next | expert), each drawn towards the next expert's share by one
        imagined use.
        """
        share = self._next_uses[layer] / max(float(self._calls[layer]), 1.0)
        if not experts.size:
            return share.astype(np.float64)
        rows = self._rows_of(experts)
        weights = 1.0 / (self._uses[layer].take(rows) + 1.0)
        scores = np.dot(weights, self._counts[layer].take(rows, axis=0).astype(np.float32))
        scores += share * np.add.reduce(weights)
        scores /= rows.size
        return scores.astype(np.float64)

    def forget(self) -> None:
        """Start anew: another layer is meant from now on."""
        for table in (self._counts, self._uses, self._next_uses, self._tokens, self._calls):
            table.fill(0)

    def _rows_of(self, experts: IntArray) -> IntArray:
        return experts if self._rows == self._num_experts else np.unique(experts % self._rows)


class PreviousTokenPredictor:
    """Tokens ask again for what the last ones asked for; a token's weight halves with each further
    one. A batch counts as if it were one sequence.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._recent = Popularity(num_layers, num_experts, half_life_tokens=1.0)

    def learn(self, layer: int, experts: IntArray) -> None:
        """The sequence's next token chose `experts` in `layer`."""
        self._recent.add(layer, experts, np.ones_like(experts), 1)

    def learn_counts(self, layer: int, experts: IntArray, counts: IntArray, tokens: int) -> None:
        """A step's `tokens` chose `experts` `counts` times: a batch as if it were one sequence."""
        self._recent.add(layer, experts, counts / tokens, 1)

    def predict(self, layer: int) -> Scores:
        """Scores of the layer's experts for the sequence's next token."""
        return self._recent.rates(layer)


class PromptPredictor:
    """A prompt's experts from its first token ids: the mean of what those ids' prompts used."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        affordable = PROMPT_BYTES // max(2 * num_layers * num_experts, 1)
        self._num_buckets = min(max(affordable, 8), MAX_PROMPT_BUCKETS)
        shape = (num_layers, self._num_buckets, num_experts)
        self._sums: npt.NDArray[np.float16] = np.zeros(shape, np.float16)
        self._prompts: npt.NDArray[np.float32] = np.zeros(shape[:2], np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._sums.nbytes + self._prompts.nbytes

    def buckets(self, token_ids: Sequence[int]) -> IntArray:
        """The rows that a prompt's first ids fall into, each once."""
        # Of a request that nobody has looked at yet: its ids may be any numbers.
        first = [token_id % self._num_buckets for token_id in token_ids[:PROMPT_FIRST_TOKENS]]
        return np.unique(np.array(first, dtype=np.int64))

    def learn(self, buckets: IntArray, layer: int, rates: npt.NDArray[np.float64]) -> None:
        """A prompt with these `buckets` used a layer's experts at `rates`, as shares of tokens."""
        sums, prompts = self._sums[layer], self._prompts[layer]
        sums[buckets] += rates.astype(np.float16)
        prompts[buckets] += 1.0
        if prompts[buckets].max() >= _PROMPTS_HALVED_AT:
            sums *= np.float16(0.5)
            prompts *= np.float32(0.5)

    def predict(self, buckets: IntArray, layer: int) -> Scores | None:
        """Expected rates of a new prompt in a layer; None where no id was seen before.

        Rare ids say more about a prompt than common ones: each weighs 1 / prompts that had it.
        """
        prompts = self._prompts[layer].take(buckets)
        seen = prompts > 0
        if not seen.any():
            return None
        weights = 1.0 / prompts[seen]
        # sums / prompts is a bucket's mean, and the weight divides by prompts once more.
        sums = self._sums[layer].take(buckets[seen], axis=0).astype(np.float32)
        scores: Scores = (np.dot(weights * weights, sums) / weights.sum()).astype(np.float64)
        return scores

    def predict_all(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """`predict` for all layers at once, [layers, experts], by the rarest of the first ids.

        None where none of them was seen in every layer.
        """
        buckets = self.buckets(token_ids)
        prompts = self._prompts[:, buckets]
        known = np.flatnonzero((prompts > 0).all(axis=0))
        if not known.size:
            return None
        rarest = known[np.argsort(prompts[0, known], kind="stable")[:_RAREST_IDS]]
        weights = 1.0 / prompts[:, rarest]
        sums = self._sums[:, buckets[rarest]].astype(np.float32)
        scores = np.einsum("lb,lbe->le", weights * weights, sums)
        return (scores / weights.sum(axis=1)[:, None]).astype(np.float32)
