"""Which experts will be asked for next, before the router says so; and how often that was right.

Every predictor gives scores over the experts of a layer; a budget takes the highest. The next
layer's own gate, applied to the present hidden state, needs the model and is not here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from expert_pool.popularity import Popularity
from expert_pool.tables import IntArray

Scores = npt.NDArray[np.float64]

HALF_LIFE_TOKENS: Final = 4096.0
PROMPT_BUCKETS: Final = 1024
"""Token ids share this many rows; a few thousand prompts do not fill more."""
PROMPT_FIRST_TOKENS: Final = 32
"""Only so many first ids of a prompt are looked at."""


class TransitionPredictor:
    """The next layer's experts from this layer's, by how often they were chosen together."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._halved_every = HALF_LIFE_TOKENS
        self._counts: npt.NDArray[np.float32] = np.zeros(
            (max(num_layers - 1, 0), num_experts, num_experts), np.float32
        )
        self._uses: npt.NDArray[np.float32] = np.zeros(self._counts.shape[:2], np.float32)
        self._next_uses: npt.NDArray[np.float32] = np.zeros_like(self._uses)
        self._tokens = np.zeros(self._counts.shape[0])

    def learn(self, layer: int, experts: IntArray, next_experts: IntArray, tokens: int = 1) -> None:
        """`tokens` chose `experts` in `layer` and `next_experts` in the layer after it.

        A step of one token says most; in a batch each pair of experts counts once.
        """
        self._counts[layer][np.ix_(experts, next_experts)] += 1.0
        self._uses[layer][experts] += 1.0
        self._next_uses[layer][next_experts] += 1.0
        self._tokens[layer] += tokens
        if self._tokens[layer] >= self._halved_every:
            # Halving at intervals costs nothing a token; weights lie within a factor of two of
            # an exponential decay with that half life.
            for table in (self._counts, self._uses, self._next_uses):
                table[layer] *= 0.5
            self._tokens[layer] = 0.0

    def predict(self, layer: int, experts: IntArray) -> Scores:
        """Scores of the experts of layer + 1, where `layer` chose `experts`.

        The mean over them of P(next | expert), each drawn towards the next expert's share by one
        imagined use.
        """
        uses = self._uses[layer]
        share = self._next_uses[layer] / max(float(uses.sum()) / max(experts.size, 1), 1.0)
        known = (self._counts[layer][experts] + share) / (uses[experts] + 1.0)[:, None]
        scores: Scores = known.mean(axis=0).astype(np.float64)
        return scores


class PreviousTokenPredictor:
    """A sequence asks again for what its last tokens asked for; a token's weight halves with each
    further one. One for each running sequence.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._recent = Popularity(num_layers, num_experts, half_life_tokens=1.0)

    def learn(self, layer: int, experts: IntArray) -> None:
        """The sequence's next token chose `experts` in `layer`."""
        self._recent.add(layer, experts, np.ones_like(experts), 1)

    def predict(self, layer: int) -> Scores:
        """Scores of the layer's experts for the sequence's next token."""
        return self._recent.rates(layer)


class PromptPredictor:
    """A prompt's experts from its first token ids: the mean of what those ids' prompts used."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        shape = (PROMPT_BUCKETS, num_layers, num_experts)
        self._sums: npt.NDArray[np.float32] = np.zeros(shape, np.float32)
        self._prompts: npt.NDArray[np.float32] = np.zeros(PROMPT_BUCKETS, np.float32)

    def learn(self, token_ids: Sequence[int], rates: npt.NDArray[np.float64]) -> None:
        """A finished prompt used the experts at `rates` [layers, experts], as shares of tokens."""
        buckets = self._buckets(token_ids)
        self._sums[buckets] += rates.astype(np.float32)
        self._prompts[buckets] += 1.0

    def predict(self, token_ids: Sequence[int]) -> Scores | None:
        """Expected rates [layers, experts] of a new prompt; None where no id was seen before.

        Rare ids say more about a prompt than common ones: each weighs 1 / prompts that had it.
        """
        buckets = self._buckets(token_ids)
        seen = buckets[self._prompts[buckets] > 0]
        if not seen.size:
            return None
        weights = 1.0 / self._prompts[seen]
        # sums / prompts is a bucket's mean, and the weight divides by prompts once more.
        means = np.tensordot(weights * weights, self._sums[seen], axes=1)
        scores: Scores = (means / weights.sum()).astype(np.float64)
        return scores

    def _buckets(self, token_ids: Sequence[int]) -> IntArray:
        first = np.asarray(token_ids[:PROMPT_FIRST_TOKENS], dtype=np.int64)
        return np.unique(first % PROMPT_BUCKETS)


class LabelPredictor:
    """Popularity by label, such as a domain or a session; an unknown label gets everyone's."""

    def __init__(self, num_layers: int, num_experts: int, max_labels: int) -> None:
        if max_labels < 1:
            raise ValueError(f"expected room for at least one label, found {max_labels}")
        self.max_labels = max_labels
        self.everyone = Popularity(num_layers, num_experts, HALF_LIFE_TOKENS)
        self._labels: OrderedDict[Hashable, Popularity] = OrderedDict()

    def learn(
        self, label: Hashable, layer: int, experts: IntArray, counts: IntArray, tokens: int
    ) -> None:
        """`tokens` of `label` passed a layer and chose `experts` `counts` times."""
        self.everyone.add(layer, experts, counts, tokens)
        own = self._labels.get(label)
        if own is None:
            if len(self._labels) >= self.max_labels:
                self._labels.popitem(last=False)
            layers, num_experts = self.everyone.counts.shape
            own = self._labels[label] = Popularity(layers, num_experts, HALF_LIFE_TOKENS)
        self._labels.move_to_end(label)
        own.add(layer, experts, counts, tokens)

    def predict(self, label: Hashable, layer: int) -> Scores:
        """Expected rates: the label's own, drawn towards everyone's by 16 imagined tokens."""
        everyone = self.everyone.rates(layer)
        own = self._labels.get(label)
        if own is None:
            return everyone
        imagined = 16.0
        tokens = float(own.tokens[layer])
        scores: Scores = (own.counts[layer] + imagined * everyone) / (tokens + imagined)
        return scores


class RecallMeter:
    """Share of the experts asked for that were among the highest scores, by budget."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self.budgets = tuple(budgets)
        self.demanded = 0
        self._found = np.zeros(len(self.budgets), dtype=np.int64)

    def add(self, scores: Scores, experts: IntArray) -> None:
        """The predictor gave `scores`; the router then chose `experts`."""
        order = np.argsort(-scores, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        ranks = rank[experts]
        self.demanded += experts.size
        self._found += np.array([(ranks < budget).sum() for budget in self.budgets])

    def recall(self) -> dict[int, float]:
        """Recall by budget, of everything added so far; 0 before the first."""
        return {
            budget: int(found) / max(self.demanded, 1)
            for budget, found in zip(self.budgets, self._found, strict=True)
        }
