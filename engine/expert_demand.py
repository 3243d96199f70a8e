"""How many distinct experts a batch will ask for, learned from those of late.

If an expert's share of the traffic is drawn from a gamma distribution of shape s, then n rows that
choose k of E experts a layer are expected to touch E (1 - (1 + n k / (E s))^-s) of them: s without
bound is uniform routing, a small s one that favours few. That one number describes recorded
routing to about 1 %, and is all that is learned; steps with prompt tokens, whose rows are more
alike, have one of their own.
"""

from __future__ import annotations

import math

_SMALLEST, _LARGEST = 0.02, 100.0
_RATE = 0.05
_MISS_RATE = 0.05
_CLOSE = 0.005
"""Share of all experts by which a prediction may be off before anything is learned from it."""


class _Curve:
    """Distinct experts by rows."""

    def __init__(self, experts: int, per_row: int) -> None:
        self._experts = experts
        self._per_row = per_row
        self._log_shape = math.log(3.0)
        self._seen = 0

    def at(self, rows: float) -> float:
        """Expected distinct experts of a step of so many rows."""
        return self._value(rows, self._log_shape) if rows > 0 else 0.0

    def learn(self, rows: float, distinct: float) -> None:
        """A step of so many rows touched so many."""
        if rows < 2 or abs(self.at(rows) - distinct) < _CLOSE * self._experts:
            return
        low, high = math.log(_SMALLEST), math.log(_LARGEST)
        for _ in range(20):
            middle = (low + high) / 2
            if self._value(rows, middle) < distinct:
                low = middle
            else:
                high = middle
        self._seen += 1
        self._log_shape += max(1.0 / self._seen, _RATE) * (low - self._log_shape)

    def _value(self, rows: float, log_shape: float) -> float:
        shape = math.exp(log_shape)
        choices = rows * self._per_row
        share = 1.0 - (1.0 + choices / (self._experts * shape)) ** -shape
        return min(choices, max(self._per_row, self._experts * share))


class ExpertDemand:
    """Over all MoE layers of a model together."""

    def __init__(self, experts: int, per_token: int) -> None:
        """`experts` there are, and those that one token uses, both over all layers."""
        self._experts = experts
        self._decode = _Curve(experts, per_token)
        self._mixed = _Curve(experts, per_token)
        self._missing_share = 0.0
        self._steps = 0

    def distinct(self, decode_tokens: float, prefill_tokens: float = 0.0) -> float:
        """Distinct (layer, expert) pairs that a step is expected to ask for."""
        if not self._experts:
            return 0.0
        alone = self._decode.at(decode_tokens)
        if prefill_tokens <= 0:
            return alone
        return max(alone, self._mixed.at(decode_tokens + prefill_tokens))

    def missing(self, distinct: float) -> float:
        """Those of them that are expected to have no slot, as of late."""
        return self._missing_share * distinct

    def learn(self, decode_tokens: int, prefill_tokens: int, distinct: int, missing: int) -> None:
        """A step asked for so many, and so many of them had no slot."""
        if not self._experts or distinct <= 0:
            return
        curve = self._mixed if prefill_tokens else self._decode
        curve.learn(decode_tokens + prefill_tokens, distinct)
        self._steps += 1
        rate = max(1.0 / self._steps, _MISS_RATE)
        self._missing_share += rate * (missing / distinct - self._missing_share)
