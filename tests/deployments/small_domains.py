"""A domain classifier made by hand: each label knows some words, and no more."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deployments.domain_weights import DomainWeights
from deployments.ngram_features import NgramFeatures

FEATURES = NgramFeatures(
    seed=1, buckets=1 << 12, char_orders=(), word_orders=(1,), head_chars=200, tail_chars=200
)
WORDS = {
    "code": "def return import class lambda",
    "food": "pizza salad burger cheese 茶",
}


def small_weights(words: Mapping[str, str] = WORDS, threshold: float = 0.5) -> DomainWeights:
    """Sure of a text as soon as a tenth of its words belong to a label."""
    weights = np.zeros((len(words) + 1, FEATURES.buckets), dtype=np.float16)
    for row, (_, known) in enumerate(sorted(words.items())):
        weights[row, FEATURES.of(known)[0]] = 22.0
    bias = np.zeros(len(words) + 1, dtype=np.float32)
    bias[-1] = 3.0
    return DomainWeights(tuple(sorted(words)), FEATURES, weights, bias, 1.0, threshold, "by hand")
