"""What a step takes, learned from the steps that were run: seconds as a sum over a few counts.

The time of a step is taken to be linear in what it does, with coefficients that are never negative:
weights read (distinct experts), experts that are missing, rows computed, keys and values looked at.
Recursive least squares with forgetting keeps the sums of past steps, each divided by its own time,
so that it is the relative error which becomes small. Where the steps of late say nothing about a
coefficient (no prompt came by, all batches are alike), it stays what it was.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_NAMES = ("step", "decode_token", "prefill_token", "expert", "missing_expert", "kv_token")
_SIZE = len(_NAMES)
_GUESS = (0.15, 0.1, 0.1, 0.7, 0.0, 0.05)
"""Shares of a step's time before anything is known: most of it goes into reading experts."""
_WARM_UP_STEPS = 3
"""First steps, which also pay for allocations and cold caches; they only give a guess."""
_KNOWN_STEPS = 8
"""Steps learned from, from which predictions count."""
_MEMORY_STEPS, _SHORT_MEMORY_STEPS = 150.0, 40.0
_MEMORY_BY_ERROR = 6.0
"""Memory in steps times the error: where predictions are off, the past counts for less."""
_OFTEN_STEPS, _SOLVE_EVERY = 40, 4
"""Steps after which coefficients are worked out at each step at first, and later at every so
many: it takes about 0.1 ms."""
_INERTIA = 0.1
"""How much a coefficient's last value weighs, in steps."""
_ERROR_STEPS = 40.0
_OUTLIER = 0.5
"""Relative deviation from which a step is out of line, if the usual error is small."""
_SHORTEST_S = 1e-9
"""What clocks tell apart."""
_OUTLIERS_IN_A_ROW = 5
"""So many are no accident: the machine has changed."""

_Array = npt.NDArray[np.float64]


class StepFeatures(NamedTuple):
    """What a step does, in counts."""

    decode_tokens: float
    prefill_tokens: float
    experts: float
    """Distinct (layer, expert) pairs whose weights it reads."""
    missing: float
    """Those of them that have no slot when asked for."""
    kv_tokens: float
    """Tokens whose keys and values it looks at, over all its sequences."""


class StepCost:
    """Learns from each step, predicts the next. No clock of its own."""

    def __init__(self) -> None:
        self.error = 0.0
        """Mean of |measured - predicted| / measured over the last steps."""
        self._steps = 0
        self._first_s = math.inf
        self._gram: _Array = np.zeros((_SIZE, _SIZE))
        self._moment: _Array = np.zeros(_SIZE)
        self._scale: _Array = np.zeros(_SIZE)
        """Mean square of each count over its step's time, where there was any; forgotten ten times
        as slowly."""
        self._weights = [0.0] * _SIZE
        self._outliers = 0

    @property
    def known(self) -> bool:
        """Whether predictions are more than a guess."""
        return self._steps >= _WARM_UP_STEPS + _KNOWN_STEPS

    @property
    def coefficients(self) -> dict[str, float]:
        """Seconds that one more of each adds to a step, and those of a step that does nothing."""
        return dict(zip(_NAMES, self._weights, strict=True))

    def predict_s(self, features: StepFeatures) -> float:
        """Seconds of a step that does this much; 0 before the first one was learned from."""
        step, decode, prefill, expert, missing, kv = self._weights
        return (
            step
            + decode * features.decode_tokens
            + prefill * features.prefill_tokens
            + expert * features.experts
            + missing * features.missing
            + kv * features.kv_tokens
        )

    def learn(self, features: StepFeatures, step_s: float) -> None:
        """A step that did this took so long. What is no number, 0 or negative is left out."""
        if not (_SHORTEST_S <= step_s < math.inf and all(0 <= f < math.inf for f in features)):
            return
        self._steps += 1
        counts = np.array((1.0, *features))
        if self._steps <= _WARM_UP_STEPS:
            if step_s < self._first_s:
                self._first_s = step_s
                self._guess(counts, step_s)
            return
        if self._is_out_of_line(self.predict_s(features), step_s):
            return
        per_s = counts / step_s
        memory = min(_MEMORY_STEPS, _MEMORY_BY_ERROR / max(self.error, 1e-3))
        keep = 1.0 - 1.0 / max(_SHORT_MEMORY_STEPS, memory)
        self._gram = keep * self._gram + np.outer(per_s, per_s)
        self._moment = keep * self._moment + per_s
        slowly = max(1.0 / (self._steps - _WARM_UP_STEPS), 0.1 / _MEMORY_STEPS)
        present = counts > 0
        self._scale[present] += slowly * (per_s[present] ** 2 - self._scale[present])
        learned = self._steps - _WARM_UP_STEPS
        if learned <= _OFTEN_STEPS or learned % _SOLVE_EVERY == 0 or self._outliers:
            self._solve()

    def _guess(self, counts: _Array, step_s: float) -> None:
        decode, prefill = counts[1], counts[2]
        rows = max(1.0, decode + prefill)
        amounts = (1.0, rows, rows, counts[3], counts[4], counts[5])
        self._weights = [
            share * step_s / max(1.0, amount) if amount else 0.0
            for share, amount in zip(_GUESS, amounts, strict=True)
        ]

    def _is_out_of_line(self, predicted_s: float, step_s: float) -> bool:
        """Books the error; says whether the step is better not learned from."""
        deviation = abs(step_s - predicted_s) / step_s
        usual, learned = self.error, self._steps - _WARM_UP_STEPS
        rate = max(1.0 / learned, 1.0 / _ERROR_STEPS)
        self.error += float(rate * (min(deviation, 2.0) - self.error))
        if learned <= 2 * _KNOWN_STEPS:
            return False
        # Of a pause the deviation is below 1, so it is the ratio that is looked at.
        ratio = max(step_s, predicted_s) / max(min(step_s, predicted_s), 1e-9) - 1.0
        if ratio <= max(_OUTLIER, 4 * usual):
            self._outliers = 0
            return False
        self._outliers += 1
        if self._outliers < _OUTLIERS_IN_A_ROW:
            return True
        self._gram *= 0.1
        self._moment *= 0.1
        return False

    def _solve(self) -> None:
        """Least squares under w >= 0, by dropping and taking back one coefficient at a time
        (after Lawson and Hanson, Solving Least Squares Problems, chapter 23)."""
        inertia = _INERTIA * self._scale
        gram = self._gram + np.diag(inertia)
        moment = self._moment + inertia * np.array(self._weights)
        size = np.sqrt(np.diag(gram))
        used = size > 0
        size[~used] = 1.0
        gram = gram / np.outer(size, size)
        moment = moment / size
        kept = used.copy()
        solution = np.zeros(_SIZE)
        for _ in range(2 * _SIZE):
            solution[:] = 0.0
            solution[kept] = np.linalg.solve(gram[np.ix_(kept, kept)], moment[kept])
            worst = int(np.argmin(solution))
            if solution[worst] < 0:
                kept[worst] = False
                continue
            pull = np.where(used & ~kept, moment - gram @ solution, 0.0)
            best = int(np.argmax(pull))
            if pull[best] <= 1e-9:
                break
            kept[best] = True
        self._weights = (np.maximum(solution, 0.0) / size).tolist()
