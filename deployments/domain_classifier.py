"""Guesses what a text is about: a linear model over hashed n-grams, in a fraction of a millisecond.

`DomainGuesser` is what a service holds: it never raises, and its weights can be exchanged under
load.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.errors import SettingsError
from deployments.domain_settings import BUNDLED_NAME, OFF, DomainSettings
from deployments.domain_weights import BUNDLED, DomainWeights, DomainWeightsError
from deployments.ngram_features import FloatArray

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Guess:
    """A domain and the probability that it is right; "" and 0 where the text tells none."""

    domain: str = ""
    confidence: float = 0.0


NO_GUESS = Guess()


class DomainClassifier:
    """One set of weights; nothing of it changes, so threads share it."""

    def __init__(self, weights: DomainWeights) -> None:
        self.labels = weights.labels
        self._features = weights.features
        self._temperature = np.float32(weights.temperature)
        self._threshold = weights.threshold
        # A text gathers rows, so the values of a bucket lie together.
        self._rows: FloatArray = np.ascontiguousarray(weights.weights.T, dtype=np.float32)
        self._bias = weights.bias

    def scores(self, text: str) -> FloatArray:
        """[labels + 1] logits before calibration, the last of no domain at all."""
        ids, values = self._features.of(text)
        # Not a product of matrices: BLAS would wake its threads for these few thousand numbers.
        scores: FloatArray = np.einsum("n,nk->k", values, self._rows[ids]) + self._bias
        return scores

    def probabilities(self, text: str) -> NDArray[np.float64]:
        """[labels + 1] that make 1, the last of no domain at all."""
        return calibrated(self.scores(text)[None], float(self._temperature))[0]

    def guess(self, text: str) -> Guess:
        """Of any text, however long; what is looked at is bounded."""
        return self.verdict(self.probabilities(text))

    def verdict(self, probabilities: NDArray[np.float64]) -> Guess:
        """The domain that a row of probabilities means."""
        best = int(probabilities.argmax())
        if best == len(self.labels) or probabilities[best] < self._threshold:
            return NO_GUESS
        return Guess(self.labels[best], float(probabilities[best]))


def calibrated(scores: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """[texts, labels + 1] scores as probabilities (Guo et al. 2017, temperature scaling)."""
    scaled = scores.astype(np.float64) / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    np.exp(scaled, out=scaled)
    return scaled / scaled.sum(axis=1, keepdims=True)


class DomainGuesser:
    """The classifier of a running service, or none."""

    def __init__(self, classifier: DomainClassifier | None = None) -> None:
        self._classifier = classifier
        self._failed = False

    @classmethod
    def open(cls, settings: DomainSettings) -> DomainGuesser:
        """With the weights that the settings name; without any where they cannot be read."""
        guesser = cls()
        try:
            guesser.swap(load_classifier(settings))
        except SettingsError as error:
            log.warning("Every text's domain is unknown: %s", error)
        return guesser

    @property
    def labels(self) -> tuple[str, ...]:
        """The domains that can be guessed."""
        classifier = self._classifier
        return () if classifier is None else classifier.labels

    def guess(self, text: str) -> Guess:
        """Raises nothing: a text that cannot be looked at is of no known domain."""
        classifier = self._classifier  # once: another may take its place at any moment
        if classifier is None:
            return NO_GUESS
        try:
            return classifier.guess(text)
        except Exception:
            # A guess only makes a request faster, so no request may end by one.
            if not self._failed:
                self._failed = True
                log.exception("A text's domain could not be guessed; said once")
            return NO_GUESS

    def swap(self, classifier: DomainClassifier | None) -> None:
        """From now on guess with this one; a guess under way ends with the one it began with."""
        self._classifier = classifier
        self._failed = False


def load_classifier(settings: DomainSettings) -> DomainClassifier | None:
    """The classifier that the settings name, None where it is off. Raises SettingsError."""
    if settings.classifier == OFF:
        return None
    path = weights_path(settings)
    try:
        return DomainClassifier(DomainWeights.read(path))
    except DomainWeightsError as error:
        raise SettingsError(f"domains.classifier: {error}") from error


def checked(settings: DomainSettings) -> DomainSettings:
    """With absolute paths, after all files that are named were read. Raises SettingsError."""
    settings = settings.resolved()
    load_classifier(settings)
    settings.session_key()
    return settings


def weights_path(settings: DomainSettings) -> Path:
    """Where the weights lie that the settings name."""
    if settings.classifier == BUNDLED_NAME:
        return BUNDLED
    return Path(settings.classifier).expanduser()
