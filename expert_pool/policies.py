"""Which expert leaves a layer first. Plain numpy on flat arrays; no clock but counted tokens."""

from __future__ import annotations

import math
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from expert_pool.affinity_policy import DISCOUNT, AffinityPolicy
from expert_pool.tables import IntArray

LFU_DECAY = 0.95
"""An expert's count loses 5 % with every token that passes its layer."""
_RENORMALISE_ABOVE = 1e100
_FORGET_BELOW_LOG = -400.0


class Policy(Protocol):
    """Ranks the experts of one layer at a time. A constant number of array operations a call."""

    def touch(self, layer: int, experts: IntArray, counts: IntArray, tokens: int) -> None:
        """`tokens` passed a layer; each of the distinct `experts` was chosen `counts` times."""

    def victims(self, layer: int, candidates: IntArray, number: int) -> IntArray:
        """The `number` experts among `candidates` (ascending) to evict first, first one first.

        Fewer where there are fewer candidates. Ties go to the lower expert number.
        """

    def worth(self, layer: int) -> npt.NDArray[np.floating]:
        """What keeping each expert of a layer is worth, resident or not: an estimate of
        `E[DISCOUNT ** (touches of the layer until its next use - 1)]`, 0 to 1.
        """


class LruPolicy:
    """The least recently used leaves first; all experts of one call are equally recent."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._last_use = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._calls = 0

    def touch(self, layer: int, experts: IntArray, counts: IntArray, tokens: int) -> None:
        """Note the use of `experts`."""
        self._calls += 1
        self._last_use[layer][experts] = self._calls

    def victims(self, layer: int, candidates: IntArray, number: int) -> IntArray:
        """Longest unused first."""
        return _lowest(self._last_use[layer][candidates], candidates, number)

    def worth(self, layer: int) -> npt.NDArray[np.floating]:
        """As if an expert came back after as many touches as it has been away."""
        away = (self._calls - self._last_use[layer]) / self._last_use.shape[0]
        worth: npt.NDArray[np.floating] = DISCOUNT**away
        return worth


class LfuPolicy:
    """The least frequently used leaves first; counts decay by .95 a token of their layer.

    The tokens of one call count as simultaneous: old counts decay by .95 to the power of their
    number, then each use adds 1. Instead of decaying every count, a use is worth more the later
    it comes (`_worth`, .95 to the power of minus the tokens so far), which keeps the order.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts: npt.NDArray[np.float64] = np.zeros((num_layers, num_experts))
        self._worth = [1.0] * num_layers

    def touch(self, layer: int, experts: IntArray, counts: IntArray, tokens: int) -> None:
        """Decay the layer's counts by `tokens`, then add `counts`."""
        log_decay = tokens * math.log(LFU_DECAY)
        row = self._counts[layer]
        if log_decay < _FORGET_BELOW_LOG:
            row[:] = 0.0
            self._worth[layer] = 1.0
        else:
            worth = self._worth[layer] * math.exp(-log_decay)
            if worth > _RENORMALISE_ABOVE:
                row /= worth
                worth = 1.0
            self._worth[layer] = worth
        row[experts] += counts * self._worth[layer]

    def count(self, layer: int, expert: int) -> float:
        """An expert's decayed count as of the layer's last token."""
        return float(self._counts[layer, expert] / self._worth[layer])

    def victims(self, layer: int, candidates: IntArray, number: int) -> IntArray:
        """Lowest decayed count first."""
        return _lowest(self._counts[layer][candidates], candidates, number)

    def worth(self, layer: int) -> npt.NDArray[np.floating]:
        """As if each touch used an expert independently, at the rate of its decayed count."""
        rate = np.minimum(self._counts[layer] * ((1.0 - LFU_DECAY) / self._worth[layer]), 1.0)
        worth: npt.NDArray[np.floating] = rate / (DISCOUNT * rate + 1.0 - DISCOUNT)
        return worth


POLICIES: Final[dict[str, type[LruPolicy] | type[LfuPolicy] | type[AffinityPolicy]]] = {
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "affinity": AffinityPolicy,
}
"""By the name that `PoolSettings.policy` gives them."""


def make_policy(name: str, num_layers: int, num_experts: int) -> Policy:
    """The policy that `PoolSettings.policy` names."""
    if name not in POLICIES:
        raise ValueError(f"expected a policy among {', '.join(POLICIES)}, found {name!r}")
    return POLICIES[name](num_layers, num_experts)


def _lowest(
    keys: npt.NDArray[np.int64] | npt.NDArray[np.float64], candidates: IntArray, number: int
) -> IntArray:
    if number <= 0:
        return candidates[:0]
    if number == 1 and candidates.size:
        at = int(np.argmin(keys))
        return candidates[at : at + 1]
    return candidates[np.argsort(keys, kind="stable")[:number]]
