"""The project's own eviction policy: whom will this layer ask for soon, given whom it asks now?

Belady's optimum evicts the expert whose next use lies furthest away. For each expert of a layer
this policy estimates `V = E[DISCOUNT ** (touches until its next use - 1)]` and evicts the lowest.
The estimate is a linear model, learned while it runs, of what the pool knows before it decides:

- rates of use at four decays, each put through `rate / (DISCOUNT * rate + 1 - DISCOUNT)`: exactly
  V for an expert that is used independently with that rate;
- the affinity of experts: a table by (context expert, expert), one a layer, averaged over the
  experts that this step chose in this layer and in the layer before. Experts of one topic are used
  together, so the table knows more than any count once it has seen a few hundred tokens.

Each touch is learned from HORIZON touches later, with the present estimate standing in for what
lies beyond (n-step temporal difference learning: Sutton and Barto, Reinforcement Learning, 2nd
edition, chapters 7 and 9). The table learns what the rates leave unexplained, by normalised least
mean squares. The weights of rates and table are shared by all layers: regularised least squares
over decaying sums of what was predicted before it was learned, so a table that knows nothing yet
gets no weight. Nothing depends on capacity, clock or chance: the same calls, the same decisions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from expert_pool.tables import IntArray

FloatArray = npt.NDArray[np.float32]

DISCOUNT: Final = 0.9
"""Weight of a use one touch later. 0.85 to 0.95 differ little on any trace tried."""
HORIZON: Final = 4
"""Touches of a layer after which an outcome is learned from."""
RATE_DECAYS: Final = (0.6, 0.9, 0.98, 0.999)
PRIOR_WEIGHTS: Final = (0.3, 0.3, 0.3, 0.1, 0.0, 1.0)
"""Of the rates, a constant and the table, before anything is learned: a mixture of four LFUs."""
TABLE_BYTES_PER_EXPERT: Final = 1024
"""Bound on the affinity table; where it binds, several context experts share a row."""

_PRIOR_STRENGTH: Final = 100.0
_SUMS_KEPT: Final = 0.9999
_FIRST_STEP: Final = 0.1
_LAST_STEP: Final = 0.03
_STEP_HALVED_AFTER_USES: Final = 20.0
_SCHEDULE: Final = 8192
"""Touches after which gains no longer change."""


class AffinityPolicy:
    """The expert least likely to be asked for again soon leaves first."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        affordable_rows = TABLE_BYTES_PER_EXPERT // 4
        self._own_rows = min(num_experts, affordable_rows)
        self._looks_before = 2 * num_experts <= affordable_rows
        context_rows = self._own_rows * (2 if self._looks_before else 1)
        rates, shape = len(RATE_DECAYS), (num_layers, num_experts)
        self._table: FloatArray = np.zeros((num_layers, context_rows, num_experts), np.float32)
        self._rates: FloatArray = np.zeros((num_layers, rates, num_experts), np.float32)
        self._scores: FloatArray = np.zeros(shape, np.float32)
        self._touches = [0] * num_layers
        # What the last HORIZON touches looked like, by (layer, touch modulo HORIZON).
        self._history: npt.NDArray[np.uint8] = np.zeros(shape, np.uint8)
        """Bit i: used i touches ago."""
        self._from_rates: FloatArray = np.zeros((num_layers, HORIZON, num_experts), np.float32)
        self._contexts: list[list[tuple[IntArray, FloatArray]]] = [[] for _ in range(num_layers)]
        self._last_touch: tuple[int, IntArray, FloatArray] | None = None
        # The shared weights: normal equations, drawn towards the prior. One touch in HORIZON
        # is kept for them.
        self._kept: FloatArray = np.zeros((num_layers, rates + 2, num_experts), np.float32)
        self._weights: FloatArray = np.array(PRIOR_WEIGHTS, np.float32)
        self._gram: FloatArray = _PRIOR_STRENGTH * np.eye(rates + 2, dtype=np.float32)
        self._moment: FloatArray = np.dot(self._gram, self._weights)
        self._turn = 0
        self._gains = _gains()
        self._outcomes = _outcomes()
        self._even_shares: list[FloatArray] = [
            np.full(size, 1.0 / max(size, 1), np.float32) for size in range(num_experts + 1)
        ]
        # Written anew by every touch.
        self._used: FloatArray = np.zeros(num_experts, np.float32)
        self._scratch: FloatArray = np.zeros((rates, num_experts), np.float32)
        self._features: FloatArray = np.ones((rates + 2, num_experts), np.float32)
        self._rate_features, self._table_feature = self._features[:-2], self._features[-1]

    def touch(self, layer: int, experts: IntArray, counts: IntArray, tokens: int) -> None:
        """Note the use of `experts`, estimate anew, learn from what is HORIZON touches old."""
        if not experts.size:
            return
        touch = self._touches[layer]
        self._touches[layer] = touch + 1
        slot = touch % HORIZON
        used, features = self._used, self._features
        used.fill(0.0)
        used[experts] = 1.0
        self._note_rates(self._rates[layer], min(touch, _SCHEDULE - 1))
        context = self._context(layer, experts, counts, tokens)
        table = self._table[layer]
        np.dot(context[1], table.take(context[0], axis=0), out=self._table_feature)
        scores = np.dot(self._weights, features, out=self._scores[layer])
        history = self._history[layer]
        np.add(history, history, out=history)
        history[experts] += 1
        contexts, from_rates = self._contexts[layer], self._from_rates[layer]
        if touch < HORIZON:
            contexts.append(context)
        else:
            target = self._target(history, scores)
            # One touch in HORIZON teaches the weights, the others the table: neither costs both.
            if slot == 0:
                self._learn_weights(self._kept[layer], target)
            else:
                target -= from_rates[slot]
                self._learn_table(table, contexts[slot], touch, target)
            contexts[slot] = context
        if slot:
            np.dot(self._weights[:-1], features[:-1], out=from_rates[slot])
        else:
            # Whom this step uses cannot be evicted now, so the weights need not be right there.
            np.multiply(features, 1.0 - used, out=self._kept[layer])

    def victims(self, layer: int, candidates: IntArray, number: int) -> IntArray:
        """Lowest estimate first."""
        if number <= 0:
            return candidates[:0]
        scores = self._scores[layer].take(candidates)
        if number == 1 and candidates.size:
            at = int(scores.argmin())
            return candidates[at : at + 1]
        return candidates[scores.argsort(kind="stable")[:number]]

    def _note_rates(self, rates: FloatArray, touch: int) -> None:
        scratch = self._scratch
        np.subtract(self._used, rates, out=scratch)
        scratch *= self._gains[touch]
        rates += scratch
        np.multiply(rates, DISCOUNT, out=scratch)
        scratch += 1.0 - DISCOUNT
        np.divide(rates, scratch, out=self._rate_features)

    def _context(
        self, layer: int, experts: IntArray, counts: IntArray, tokens: int
    ) -> tuple[IntArray, FloatArray]:
        """Rows of the layer's table that stand for this step, and their weights.

        The layer before counts where its touch was the last one: that is, in the same step.
        """
        if tokens == 1:
            shares = self._even_shares[experts.size]
        else:
            shares = (counts / np.add.reduce(counts)).astype(np.float32)
        before, self._last_touch = self._last_touch, (layer, experts, shares)
        if self._looks_before and before is not None and before[0] == layer - 1:
            rows = np.concatenate((experts, before[1] + self._own_rows))
            return rows, np.concatenate((shares, before[2]))
        if self._own_rows == self._used.size:
            return experts, shares
        rows, inverse = np.unique(experts % self._own_rows, return_inverse=True)
        return rows, np.bincount(inverse, weights=shares).astype(np.float32)

    def _target(self, history: npt.NDArray[np.uint8], scores: FloatArray) -> FloatArray:
        # Not used within the horizon: what is thought of it now, HORIZON touches later. That is
        # less than any use within the horizon counts.
        target = np.minimum(scores, 1.0)
        target *= DISCOUNT**HORIZON
        return np.maximum(target, self._outcomes.take(history), out=target)

    def _learn_table(
        self, table: FloatArray, context: tuple[IntArray, FloatArray], touch: int, left: FloatArray
    ) -> None:
        rows, shares = context
        known = table.take(rows, axis=0)
        left -= np.dot(shares, known)
        uses = touch * rows.size / table.shape[0]
        step = max(_LAST_STEP, _FIRST_STEP / (1.0 + uses / _STEP_HALVED_AFTER_USES))
        shares = shares * np.float32(step / np.dot(shares, shares))
        known += np.dot(shares[:, None], left[None])
        table[rows] = known

    def _learn_weights(self, features: FloatArray, target: FloatArray) -> None:
        self._gram *= _SUMS_KEPT
        self._gram += np.dot(features, features.T)
        self._moment *= _SUMS_KEPT
        self._moment += np.dot(features, target)
        # One coordinate a time (Gauss-Seidel) is as good as solving, over a few steps' layers.
        self._turn = at = (self._turn + 1) % self._weights.size
        gram = self._gram[at]
        self._weights[at] += (self._moment[at] - np.dot(gram, self._weights)) / gram[at]


def _gains() -> FloatArray:
    """By touch of a layer: the gain of each rate, at first that of a mean, later of its decay."""
    seen = np.arange(1, _SCHEDULE + 1)[:, None]
    decays = np.array(RATE_DECAYS)
    gains = (1 - decays) / (1 - decays**seen)
    return gains[:, :, None].astype(np.float32)


def _outcomes() -> FloatArray:
    """By history of an expert: DISCOUNT ** (first use in the last HORIZON touches - 1), or 0."""
    outcomes = np.zeros(256, np.float32)
    for history in range(256):
        seen = history % 2**HORIZON
        if seen:
            outcomes[history] = DISCOUNT ** (HORIZON - seen.bit_length())
    return outcomes
