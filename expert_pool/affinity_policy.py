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
FixedArray = npt.NDArray[np.int16]

DISCOUNT: Final = 0.9
"""Weight of a use one touch later. 0.85 to 0.95 differ little on any trace tried."""
HORIZON: Final = 4
"""Touches of a layer after which an outcome is learned from."""
RATE_DECAYS: Final = (0.6, 0.9, 0.98, 0.999)
PRIOR_WEIGHTS: Final = (0.3, 0.3, 0.3, 0.1, 0.0, 1.0)
"""Of the rates, a constant and the table, before anything is learned: a mixture of four LFUs."""
TABLE_BYTES: Final = 64 * 1024
"""Bound on a layer's affinity table. Where it binds, the layer before is left out, then several
context experts share a row."""
TABLE_BYTES_PER_EXPERT: Final = 56
"""Another one, for layers of more than 128 experts."""
MOST_CONTEXT_EXPERTS: Final = 32
"""A large step is described by the experts that most of its tokens chose."""
WEIGHT_LAYERS: Final = 4
"""At most so many layers, evenly spaced, teach the weights that all of them share."""

_FIXED_POINT: Final = 4096.0
"""1.0 in the table's 16-bit numbers, which therefore range from -8 to 8."""
_PRIOR_STRENGTH: Final = 30.0
_SUMS_KEPT: Final = 0.9999
_FIRST_STEP: Final = 0.1
_LAST_STEP: Final = 0.03
_STEP_HALVED_AFTER_USES: Final = 20.0
_SCHEDULE: Final = 1024
"""Touches after which rates are no longer corrected for having seen little."""
_CYCLE: Final = 64
"""Touches over which counts grow before they are scaled back; divides _SCHEDULE."""


class AffinityPolicy:
    """The expert least likely to be asked for again soon leaves first."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        affordable = TABLE_BYTES // (2 * num_experts)
        if num_experts > 128:
            affordable = TABLE_BYTES_PER_EXPERT // 2
        self._own_rows = min(num_experts, affordable)
        self._looks_before = 2 * num_experts <= affordable
        self._num_rows = self._own_rows * (2 if self._looks_before else 1)
        rates, shape = len(RATE_DECAYS), (num_layers, num_experts)
        self._table: FixedArray = np.zeros((num_layers, self._num_rows, num_experts), np.int16)
        self._counts: FloatArray = np.zeros((num_layers, rates, num_experts), np.float32)
        """Uses, each worth the more the later it came; see _worth_of_a_use."""
        self._scores: FloatArray = np.zeros(shape, np.float32)
        self._touches = [0] * num_layers
        # What the last HORIZON touches looked like, by (layer, touch modulo HORIZON).
        self._history: npt.NDArray[np.uint8] = np.zeros(shape, np.uint8)
        """Bit i: used i touches ago."""
        self._from_rates: FixedArray = np.zeros((num_layers, HORIZON, num_experts), np.int16)
        self._contexts: list[list[tuple[IntArray, FloatArray]]] = [[] for _ in range(num_layers)]
        self._last_touch: tuple[int, IntArray, FloatArray] | None = None
        # The shared weights: normal equations, drawn towards the prior.
        every = -(-num_layers // WEIGHT_LAYERS)
        self._kept_of = [n // every if n % every == 0 else None for n in range(num_layers)]
        self._kept: FloatArray = np.zeros(
            (-(-num_layers // every), rates + 2, num_experts), np.float32
        )
        self._weights, self._gram = _prior()
        self._moment: FloatArray = np.dot(self._gram, self._weights)
        self._turn = 0
        self._worth, self._scale_back, self._offsets = _schedules()
        self._outcomes = _outcomes()
        self._even_shares: list[FloatArray] = [
            np.full(size, 1.0 / max(size, 1), np.float32) for size in range(num_experts + 1)
        ][: MOST_CONTEXT_EXPERTS + 1]
        # Written anew by every touch.
        self._used: FloatArray = np.zeros(num_experts, np.float32)
        self._target: FloatArray = np.zeros(num_experts, np.float32)
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
        used = self._used
        used.fill(0.0)
        used[experts] = 1.0
        self._note_rates(self._counts[layer], touch)
        context = rows, shares = self._context(layer, experts, counts, tokens)
        table = self._table[layer]
        feature = self._table_feature
        np.dot(shares, table.take(rows, axis=0).astype(np.float32), out=feature)
        feature *= 1.0 / _FIXED_POINT
        scores = np.dot(self._weights, self._features, out=self._scores[layer])
        history = self._history[layer]
        np.add(history, history, out=history)
        history[experts] += 1
        contexts, from_rates = self._contexts[layer], self._from_rates[layer, slot]
        # One touch in HORIZON teaches the weights, the others the table: neither costs both.
        kept = self._kept_of[layer] if slot == 0 else None
        if touch < HORIZON:
            contexts.append(context)
        else:
            self._find_target(history, scores)
            if kept is not None:
                self._learn_weights(self._kept[kept])
            else:
                self._learn_table(table, contexts[slot], from_rates, touch)
            contexts[slot] = context
        if kept is not None:
            # Whom this step uses cannot be evicted now, so the weights need not be right there.
            np.multiply(self._features, 1.0 - used, out=self._kept[kept])
        feature *= self._weights[-1]
        np.subtract(scores, feature, out=feature)
        np.multiply(feature, _FIXED_POINT, out=from_rates, casting="unsafe")

    def victims(self, layer: int, candidates: IntArray, number: int) -> IntArray:
        """Lowest estimate first."""
        if number <= 0:
            return candidates[:0]
        scores = self._scores[layer].take(candidates)
        if number == 1 and candidates.size:
            at = int(scores.argmin())
            return candidates[at : at + 1]
        return candidates[scores.argsort(kind="stable")[:number]]

    def worth(self, layer: int) -> npt.NDArray[np.floating]:
        """The present estimate, within 0 and 1."""
        return np.clip(self._scores[layer], 0.0, 1.0)

    def _note_rates(self, counts: FloatArray, touch: int) -> None:
        phase, scratch = touch % _CYCLE, self._scratch
        if phase == 0:
            counts *= self._scale_back
        np.multiply(self._worth[phase], self._used, out=scratch)
        counts += scratch
        at = touch if touch < _SCHEDULE else _SCHEDULE - _CYCLE + phase
        np.add(counts, self._offsets[at], out=scratch)
        np.divide(counts, scratch, out=self._rate_features)

    def _context(
        self, layer: int, experts: IntArray, counts: IntArray, tokens: int
    ) -> tuple[IntArray, FloatArray]:
        """Rows of the layer's table that stand for this step, and their weights.

        The layer before counts where its touch was the last one: that is, in the same step.
        """
        if experts.size > MOST_CONTEXT_EXPERTS:
            most = np.argsort(-counts, kind="stable")[:MOST_CONTEXT_EXPERTS]
            experts, counts = experts[most], counts[most]
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
        # Of two in one row, the later one teaches it: less than both would, and cheap.
        return experts % self._own_rows, shares

    def _find_target(self, history: npt.NDArray[np.uint8], scores: FloatArray) -> None:
        # Not used within the horizon: what is thought of it now, HORIZON touches later. That is
        # less than any use within the horizon counts.
        target = np.minimum(scores, 1.0, out=self._target)
        target *= DISCOUNT**HORIZON
        np.maximum(target, self._outcomes.take(history), out=target)

    def _learn_table(
        self,
        table: FixedArray,
        context: tuple[IntArray, FloatArray],
        from_rates: FixedArray,
        touch: int,
    ) -> None:
        rows, shares = context
        known = table.take(rows, axis=0).astype(np.float32)
        left = self._target
        left *= _FIXED_POINT
        left -= from_rates
        left -= np.dot(shares, known)
        uses = touch * rows.size / self._num_rows
        step = max(_LAST_STEP, _FIRST_STEP / (1.0 + uses / _STEP_HALVED_AFTER_USES))
        shares = shares * np.float32(step / np.dot(shares, shares))
        known += np.dot(shares[:, None], left[None])
        table[rows] = known

    def _learn_weights(self, features: FloatArray) -> None:
        self._gram *= _SUMS_KEPT
        self._gram += np.dot(features, features.T)
        self._moment *= _SUMS_KEPT
        self._moment += np.dot(features, self._target)
        # One coordinate a time (Gauss-Seidel) is as good as solving, over a few steps' layers.
        self._turn = at = (self._turn + 1) % self._weights.size
        gram = self._gram[at]
        self._weights[at] += (self._moment[at] - np.dot(gram, self._weights)) / gram[at]


def _prior() -> tuple[FloatArray, FloatArray]:
    """Weights and normal equations. The features of rates are DISCOUNT times their V."""
    scale = np.ones(len(PRIOR_WEIGHTS))
    scale[: len(RATE_DECAYS)] = DISCOUNT
    weights = (np.array(PRIOR_WEIGHTS) / scale).astype(np.float32)
    return weights, np.diag(_PRIOR_STRENGTH * scale**2).astype(np.float32)


def _schedules() -> tuple[FloatArray, FloatArray, FloatArray]:
    """Worth of a use by phase [_CYCLE, rates, 1], what a cycle's end leaves of counts [rates, 1],
    and by touch what is added to a count below the line [_SCHEDULE, rates, 1].

    A use at phase p counts decay^-p, so that the others need not be decayed. With z the sum of the
    weights of all touches so far, rate = count * decay^p / z, and DISCOUNT times the rate's V is
    count / (count + (1 - DISCOUNT) * z / (DISCOUNT * decay^p)).
    """
    decays = np.array(RATE_DECAYS)
    touches = np.arange(_SCHEDULE)[:, None]
    z = (1.0 - decays ** (touches + 1)) / (1.0 - decays)
    offsets = (1.0 - DISCOUNT) / DISCOUNT * z / decays ** (touches % _CYCLE)
    worth = decays ** -np.arange(_CYCLE)[:, None]
    scale_back = decays**_CYCLE
    return tuple(a.astype(np.float32)[..., None] for a in (worth, scale_back, offsets))  # type: ignore[return-value]


def _outcomes() -> FloatArray:
    """By history of an expert: DISCOUNT ** (first use in the last HORIZON touches - 1), or 0."""
    outcomes = np.zeros(256, np.float32)
    for history in range(256):
        seen = history % 2**HORIZON
        if seen:
            outcomes[history] = DISCOUNT ** (HORIZON - seen.bit_length())
    return outcomes
