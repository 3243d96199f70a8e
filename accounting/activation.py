"""How much of a model its tokens use: ratios, concentration and reuse of experts.

All take recorded routing: `expert_ids` [tokens, layers, k], the experts that each token chose.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]


def loads(expert_ids: IntArray, num_experts: int) -> npt.NDArray[np.int64]:
    """Times that each expert was chosen, [layers, num_experts]."""
    layers = expert_ids.shape[1]
    numbers = expert_ids + np.arange(layers)[None, :, None] * num_experts
    counts = np.bincount(numbers.ravel(), minlength=layers * num_experts)
    return counts.reshape(layers, num_experts).astype(np.int64)


def sequence_activation_ratio(expert_ids: IntArray, num_experts: int) -> float:
    """Distinct experts that a sequence used over all experts, all layers together."""
    used = loads(expert_ids, num_experts) > 0
    return float(used.mean()) if used.size else 0.0


def router_entropy(load: IntArray) -> float:
    """Entropy of a layer's load over log E: 1 is even, 0 is one expert for all."""
    total = load.sum()
    if load.size < 2 or not total:
        return 0.0
    shares = load[load > 0] / total
    return float(-(shares * np.log(shares)).sum() / math.log(load.size))


def top_share(load: IntArray, percent: float) -> float:
    """Share of a layer's load on its most loaded `percent` of experts, at least one of them."""
    total = load.sum()
    if not total:
        return 0.0
    number = max(1, round(load.size * percent / 100))
    return float(np.sort(load)[::-1][:number].sum() / total)


def distinct_experts(
    expert_ids: IntArray, num_experts: int, batch: int, samples: int, seed: int
) -> float:
    """Mean distinct experts a layer in a step of `batch` tokens drawn at random from the record.

    Every token is as likely, as for sequences that have nothing to do with each other.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(samples):
        rows = random.integers(0, len(expert_ids), batch)
        found.append((loads(expert_ids[rows], num_experts) > 0).sum(axis=1).mean())
    return float(np.mean(found))


def expected_distinct_experts(num_experts: int, top_k: int, batch: int) -> float:
    """The same if every token drew its experts evenly and alone: E (1 - (1 - k/E)^B)."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** batch)


def overlap(one: IntArray, other: IntArray, percent: float) -> float:
    """Share of common experts among the most loaded `percent` of two loads [layers, E]."""
    number = max(1, round(one.shape[1] * percent / 100))
    tops = [np.argsort(-load, axis=1, kind="stable")[:, :number] for load in (one, other)]
    shared = [
        len(set(a) & set(b)) / number for a, b in zip(*map(np.ndarray.tolist, tops), strict=True)
    ]
    return float(np.mean(shared))


def knee(sizes: list[int], costs: list[float]) -> int | None:
    """The size from which one more costs twice what it cost before; None where none does.

    `costs` belong to ascending `sizes`; the cost of one more is the slope to the next size.
    """
    slopes = [
        (costs[at + 1] - costs[at]) / (sizes[at + 1] - sizes[at]) for at in range(len(sizes) - 1)
    ]
    for at in range(1, len(slopes)):
        if slopes[at - 1] > 0 and slopes[at] >= 2 * slopes[at - 1]:
            return sizes[at]
    return None
