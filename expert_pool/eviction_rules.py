"""What stands between a layer that needs room and the policy: hysteresis by the router's scores."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from expert_pool.policies import Policy
from expert_pool.tables import IntArray

SCORE_DECAY: Final = 0.95
"""A smoothed router score loses 5 % with every token that passes its layer."""
RETURNED_WITHIN: Final = 2
"""An expert that is read again within so many touches of its layer was thrown out too early."""

FloatArray = npt.NDArray[np.float32]


class EvictionRules:
    """A policy, except that an expert which the router has favoured lately leaves last.

    Its score is the share of the router's weight that it got, smoothed over the tokens of its
    layer. From `hysteresis` times an even share on (`1 / experts`) it is spared while another
    expert can leave: it would likely be read again within milliseconds. 0 switches that off.
    """

    def __init__(
        self,
        policy: Policy,
        num_layers: int,
        num_experts: int | Sequence[int],
        hysteresis: float = 0.0,
    ) -> None:
        """`num_experts` of each layer, or of all of them."""
        by_layer = [num_experts] * num_layers if isinstance(num_experts, int) else num_experts
        num_experts = max(by_layer)
        self.policy = policy
        self.returns = 0
        """Experts that were read again within RETURNED_WITHIN touches of their eviction."""
        self._spared_from = [hysteresis / number for number in by_layer]
        self.wants_weights = hysteresis > 0
        """Whether `touch` looks at the router's weights."""
        scored = num_layers if self.wants_weights else 0
        self._scores: FloatArray = np.zeros((scored, num_experts), np.float32)
        self._share: FloatArray = np.zeros(num_experts, np.float32)
        self._touches = [0] * num_layers
        self._num_experts = num_experts
        self._gone: list[list[int]] = [[] for _ in range(num_layers)]
        """By layer: touch * experts + expert of the last evictions."""

    def touch(
        self,
        layer: int,
        experts: IntArray,
        counts: IntArray,
        tokens: int,
        weights: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """As `Policy.touch`; `weights` are what each of `experts` got from the router.

        Without them, every choice counts the same.
        """
        self._touches[layer] += 1
        self.policy.touch(layer, experts, counts, tokens)
        if self.wants_weights:
            given = counts if weights is None else weights
            total = float(np.add.reduce(given))
            kept = SCORE_DECAY**tokens
            if total > 0:
                share, scores = self._share, self._scores[layer]
                share.fill(0.0)
                # Before it becomes float32, which sums of wild weights exceed: infinity stays.
                share[experts] = given * ((1.0 - kept) / total)
                scores *= kept
                scores += share

    def victims(self, layer: int, candidates: IntArray, number: int) -> IntArray:
        """As `Policy.victims`, the spared ones last."""
        if self.wants_weights and number > 0:
            spared = self._scores[layer].take(candidates) >= self._spared_from[layer]
            if spared.any():
                first = self.policy.victims(layer, candidates[~spared], number)
                if first.size == number:
                    return first
                rest = self.policy.victims(layer, candidates[spared], number - first.size)
                return np.concatenate((first, rest))
        return self.policy.victims(layer, candidates, number)

    def worth(self, layer: int) -> npt.NDArray[np.floating]:
        """The policy's own."""
        return self.policy.worth(layer)

    def evicted(self, layer: int, expert: int) -> None:
        """An expert has left to make room."""
        gone, touch = self._gone[layer], self._touches[layer]
        gone.append(touch * self._num_experts + expert)
        oldest = (touch - RETURNED_WITHIN) * self._num_experts
        if gone[0] < oldest:
            del gone[: bisect_left(gone, oldest)]

    def missed(self, layer: int, experts: IntArray) -> None:
        """A layer asked for `experts` which are not there."""
        gone = self._gone[layer]
        if gone:
            oldest = (self._touches[layer] - RETURNED_WITHIN) * self._num_experts
            lately = {code % self._num_experts for code in gone[bisect_left(gone, oldest) :]}
            self.returns += len(lately.intersection(experts.tolist()))
