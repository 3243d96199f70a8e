"""The project's own eviction policy: who will this layer ask for soon, given whom it asks for now?

Belady's optimum evicts the expert whose next use lies furthest away. For each expert of a layer
this policy estimates `V = E[DISCOUNT ** (touches until its next use - 1)]` and evicts the lowest.
The estimate is a linear model, learned while it runs, of what the pool knows before it decides:

- rates of use at four decays, each put through `rate / (DISCOUNT * rate + 1 - DISCOUNT)`: exactly
  V for an expert used independently with that rate. Their weights are shared by all layers;
- the affinity of experts: a table by (context expert, expert), one a layer, averaged over the
  experts that this step chose in this layer and in the layer before. Experts of one topic are used
  together, so a table of 64 x 64 numbers knows more than any count.

Each touch is learned from HORIZON touches later, with the present estimate standing in for what
lies beyond the horizon (n-step temporal difference learning: Sutton and Barto, Reinforcement
Learning, 2nd edition, sections 7.1 and 9.4): the table by normalised least mean squares, the
shared weights by regularised least squares over decaying sums. Nothing depends on capacity, clock
or chance, so a replayed log gives the same decisions as the live pool.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from expert_pool.tables import IntArray

FloatArray = npt.NDArray[np.float32]

DISCOUNT: Final = 0.9
"""Weight of a use one touch later. 0.85 to 0.95 differ little on any trace tried."""
HORIZON: Final = 8
"""Touches of a layer after which an outcome is learned from."""
RATE_DECAYS: Final = (0.6, 0.9, 0.98, 0.999)
PRIOR_WEIGHTS: Final = (0.3, 0.3, 0.3, 0.1, 0.0)
"""Of the rates and of a constant, before anything is learned: a mixture of four LFUs."""
TABLE_BYTES_PER_EXPERT: Final = 1024
"""Bound on the affinity table; where it binds, several context experts share a row."""

_PRIOR_STRENGTH: Final = 250.0
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
        # What HORIZON touches ago looked like, by (layer, touch modulo HORIZON).
        self._outcomes: FloatArray = np.zeros((num_layers, HORIZON, num_experts), np.float32)
        self._from_rates: FloatArray = np.zeros((num_layers, HORIZON, num_experts), np.float32)
        self._features: FloatArray = np.zeros((num_layers, rates + 1, num_experts), np.float32)
        self._contexts: list[list[tuple[IntArray, FloatArray]]] = [[] for _ in range(num_layers)]
        self._last_touch: tuple[int, IntArray, FloatArray] | None = None
        # Shared weights: normal equations pulled towards the prior.
        self._weights: FloatArray = np.array(PRIOR_WEIGHTS, np.float32)
        self._gram = _PRIOR_STRENGTH * np.eye(rates + 1)
        self._moment = _PRIOR_STRENGTH * np.array(PRIOR_WEIGHTS)
        self._gains = _gains()
        self._discounts = _discounts()
        self._used: FloatArray = np.zeros(num_experts, np.float32)
        self._scratch: FloatArray = np.zeros((rates, num_experts), np.float32)

    def touch(self, layer: int, experts: IntArray, counts: IntArray, tokens: int) -> None:
        """Note the use of `experts`, learn from what is HORIZON touches old, estimate anew."""
        if not experts.size:
            return
        touch = self._touches[layer]
        self._touches[layer] = touch + 1
        slot = touch % HORIZON
        used = self._used
        used.fill(0.0)
        used[experts] = 1.0
        features = self._note_rates(layer, min(touch, _SCHEDULE - 1), used)
        from_rates = self._weights @ features
        rows, shares = self._context(layer, experts, counts)
        table = self._table[layer]
        scores = self._scores[layer]
        np.add(from_rates, shares @ table.take(rows, axis=0), out=scores)
        outcomes = self._outcomes[layer]
        np.maximum(outcomes, self._discounts[slot] * used, out=outcomes)
        context = (rows, shares)
        if touch < HORIZON:
            self._contexts[layer].append(context)
        else:
            self._learn(layer, touch, outcomes[slot], scores)
            self._contexts[layer][slot] = context
        outcomes[slot] = 0.0
        self._from_rates[layer, slot] = from_rates
        if slot == 0:
            self._features[layer] = features

    def victims(self, layer: int, candidates: IntArray, number: int) -> IntArray:
        """Lowest estimate first."""
        if number <= 0:
            return candidates[:0]
        scores = self._scores[layer].take(candidates)
        if number == 1 and candidates.size:
            at = int(scores.argmin())
            return candidates[at : at + 1]
        return candidates[scores.argsort(kind="stable")[:number]]

    def _note_rates(self, layer: int, touch: int, used: FloatArray) -> FloatArray:
        rates, scratch = self._rates[layer], self._scratch
        np.subtract(used, rates, out=scratch)
        scratch *= self._gains[touch]
        rates += scratch
        np.multiply(rates, DISCOUNT, out=scratch)
        scratch += 1.0 - DISCOUNT
        features: FloatArray = np.ones((len(RATE_DECAYS) + 1, used.size), np.float32)
        np.divide(rates, scratch, out=features[:-1])
        return features

    def _context(
        self, layer: int, experts: IntArray, counts: IntArray
    ) -> tuple[IntArray, FloatArray]:
        """Rows of the layer's table that stand for this step, and their weights.

        The layer before counts where its touch was the last one: that is, in the same step.
        """
        shares = counts.astype(np.float32)
        shares /= shares.sum()
        before, self._last_touch = self._last_touch, (layer, experts, shares)
        if self._looks_before and before is not None and before[0] == layer - 1:
            rows = np.concatenate((experts, before[1] + self._own_rows))
            return rows, np.concatenate((shares, before[2]))
        if self._own_rows == self._used.size:
            return experts, shares
        rows, inverse = np.unique(experts % self._own_rows, return_inverse=True)
        return rows, np.bincount(inverse, weights=shares).astype(np.float32)

    def _learn(self, layer: int, touch: int, outcome: FloatArray, scores: FloatArray) -> None:
        slot = touch % HORIZON
        rows, shares = self._contexts[layer][slot]
        table = self._table[layer]
        # Not used within the horizon: what is thought of it now, HORIZON touches later.
        target = np.minimum(scores, 1.0)
        target *= DISCOUNT**HORIZON
        np.maximum(target, outcome, out=target)
        known = table.take(rows, axis=0)
        left = target - shares @ known
        if slot == 0:
            self._learn_weights(self._features[layer], left)
        left -= self._from_rates[layer, slot]
        uses = touch * rows.size / table.shape[0]
        step = max(_LAST_STEP, _FIRST_STEP / (1.0 + uses / _STEP_HALVED_AFTER_USES))
        step /= float(shares @ shares)
        known += np.multiply.outer(shares * step, left)
        table[rows] = known

    def _learn_weights(self, features: FloatArray, target: FloatArray) -> None:
        self._gram *= _SUMS_KEPT
        self._gram += features @ features.T
        self._moment *= _SUMS_KEPT
        self._moment += features @ target
        self._weights = np.linalg.solve(self._gram, self._moment).astype(np.float32)


def _gains() -> FloatArray:
    """By touch of a layer: the gain of each rate, at first that of a mean, later of its decay."""
    seen = np.arange(1, _SCHEDULE + 1)[:, None]
    decays = np.array(RATE_DECAYS)
    gains = (1 - decays) / (1 - decays**seen)
    return gains[:, :, None].astype(np.float32)


def _discounts() -> FloatArray:
    """By slot written now: the weight of a use now for the touch in each slot."""
    slots = np.arange(HORIZON)
    age = (slots[:, None] - slots[None, :] - 1) % HORIZON + 1
    return (DISCOUNT ** (age - 1.0))[:, :, None].astype(np.float32)
