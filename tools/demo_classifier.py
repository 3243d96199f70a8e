"""Naive Bayes on character n-grams: which domain does a text belong to?"""

from __future__ import annotations

import math
from collections import Counter

SIZES = (2, 3, 4)
"""Lengths of the n-grams, in characters."""


def grams(text: str) -> Counter[str]:
    """Counts of the text's n-grams, lower case, white space as one blank."""
    plain = " " + " ".join(text.lower().split()) + " "
    return Counter(plain[i : i + n] for n in SIZES for i in range(len(plain) - n + 1))


class DomainClassifier:
    """Multinomial naive Bayes with equal priors and add-a-little smoothing."""

    def __init__(self, smoothing: float = 0.1) -> None:
        self.smoothing = smoothing
        self.counts: dict[str, Counter[str]] = {}
        self.totals: dict[str, int] = {}
        self.known = 1

    def fit(self, texts: dict[str, list[str]], characters: int = 600_000) -> None:
        """Learn from at most ``characters`` of every domain's texts."""
        for domain, samples in texts.items():
            counts: Counter[str] = Counter()
            used = 0
            for sample in samples:
                counts.update(grams(sample))
                used += len(sample)
                if used >= characters:
                    break
            self.counts[domain] = counts
            self.totals[domain] = counts.total()
        self.known = max(1, len(set().union(*self.counts.values())))

    def classify(self, text: str) -> str:
        """The most probable domain of a text."""
        found = grams(text)

        def score(domain: str) -> float:
            counts = self.counts[domain]
            base = math.log(self.totals[domain] + self.smoothing * self.known)
            return sum(
                times * (math.log(counts.get(gram, 0) + self.smoothing) - base)
                for gram, times in found.items()
            )

        return max(self.counts, key=score)
