"""Training of the domain classifier: a multinomial logistic regression, calibrated."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.domain_records import HELD_OUT, PARTS, Progress, Record, RecordError, domain_labels
from app.domain_views import Nothing, view
from core.errors import CoterieError
from deployments.domain_classifier import calibrated
from deployments.domain_settings import UNKNOWN
from deployments.domain_weights import DomainWeights
from deployments.ngram_features import NgramFeatures

FEATURES = NgramFeatures(
    seed=6,
    buckets=1 << 15,
    char_orders=(2, 3, 4),
    word_orders=(1, 2),
    head_chars=1024,
    tail_chars=1024,
)
_CALIBRATES = (HELD_OUT + 1) % PARTS
_INVERSE_PENALTY = 30.0
_EVENING = 0.3
"""A label's weight falls with this power of its number of texts."""
_MOST_ROUNDS = 100
_MOST_CHARS = 32_000_000
"""Of texts that are looked at; some 20 bytes of memory a character."""
_NOTHING_SHARE = 0.08
_LEAST_THRESHOLD = 0.4
_KEPT_SHARE = 0.99
"""So many of the texts that have a domain are guessed at, whatever the texts of none."""
_NOTHING_CAUGHT = 0.95


def train(records: Sequence[Record], seed: int, progress: Progress) -> DomainWeights:
    """A classifier of all records but the tenth of their groups that is held out.

    A first one is trained without a second tenth, which then tells temperature and threshold.
    The same records and seed give the same bytes on the same machine. Raises RecordError, and
    CoterieError where scikit-learn is missing.
    """
    regression = _regression()
    labels = domain_labels(list(records))
    taught = [record for record in records if record.part != HELD_OUT]
    if not taught:
        raise RecordError(
            f"expected texts beside those held out, found all {len(records)} in groups that are: "
            "give texts of different origin different groups"
        )
    draw = random.Random(seed)
    texts = [record.text for record in taught] + [view(record, draw) for record in taught]
    targets = [*labels, UNKNOWN]
    answers = [targets.index(record.label) for record in taught] * 2
    parts = [record.part for record in taught] * 2
    nothing = Nothing([record.text for record in taught], draw)
    extra = max(PARTS * 4, int(_NOTHING_SHARE * len(texts)))
    texts += [nothing.text() for _ in range(extra)]
    answers += [len(labels)] * extra
    parts += [number % PARTS for number in range(extra)]
    chosen = _within_memory(texts, draw)
    rows = _matrix([texts[number] for number in chosen], progress)
    known, part = np.asarray(answers)[chosen], np.asarray(parts)[chosen]
    _refuse_few(known, part, targets)

    first = part != _CALIBRATES
    progress("fitting without the calibrating tenth", 0, 2)
    weights, bias = regression(rows[first], known[first])
    rest = ~first
    scores = rows[rest] @ weights.T + bias
    temperature = fitted_temperature(scores, known[rest])
    threshold = fitted_threshold(calibrated(scores, temperature), known[rest])
    progress("fitting all but the held-out tenth", 1, 2)
    weights, bias = regression(rows, known)
    progress("fitting all but the held-out tenth", 2, 2)
    return DomainWeights(
        labels=tuple(labels),
        features=FEATURES,
        weights=weights.astype(np.float16),
        bias=bias.astype(np.float32),
        temperature=temperature,
        threshold=threshold,
        facts=f"{len(taught)} of {len(records)} records, {len(chosen)} views of them, seed {seed}",
    )


def fitted_temperature(scores: NDArray[Any], known: NDArray[Any]) -> float:
    """What the scores must be divided by for the least cross entropy, from 1/8 to 8."""

    def loss(power: float) -> float:
        probabilities = calibrated(scores, 2.0**power)[np.arange(known.size), known]
        return float(-np.log(np.maximum(probabilities, 1e-12)).mean())

    low, high = -3.0, 3.0
    # The loss is convex in 1 / temperature, so it has one least value: thirds close in on it.
    while high - low > 0.01:
        third = (high - low) / 3
        if loss(low + third) < loss(high - third):
            high -= third
        else:
            low += third
    return round(2.0 ** ((low + high) / 2), 3)


def fitted_threshold(probabilities: NDArray[np.float64], known: NDArray[Any]) -> float:
    """The probability below which a guess is none: most texts of no domain lie below it."""
    nothing = probabilities.shape[1] - 1
    best = probabilities.argmax(axis=1)
    sure = probabilities.max(axis=1)
    fooled = np.where(best == nothing, 0.0, sure)[known == nothing]
    right = sure[(known != nothing) & (best == known)]
    wanted = float(np.quantile(fooled, _NOTHING_CAUGHT)) if fooled.size else 0.0
    allowed = float(np.quantile(right, 1 - _KEPT_SHARE)) if right.size else 0.0
    return round(max(_LEAST_THRESHOLD, min(wanted, allowed)), 3)


def _within_memory(texts: Sequence[str], draw: random.Random) -> list[int]:
    """Numbers of texts, all of them where they are not too much together."""
    window = FEATURES.head_chars + FEATURES.tail_chars
    sizes = [min(len(text), window) for text in texts]
    share = _MOST_CHARS / max(1, sum(sizes))
    if share >= 1.0:
        return list(range(len(texts)))
    return [number for number in range(len(texts)) if draw.random() < share]


def _matrix(texts: Sequence[str], progress: Progress) -> Any:
    """[texts, buckets], sparse."""
    ids, values, ends = [], [], [0]
    for number, text in enumerate(texts):
        if number % 500 == 0:
            progress("looking at texts", number, len(texts))
        where, value = FEATURES.of(text)
        ids.append(where.astype(np.int32))
        values.append(value)
        ends.append(ends[-1] + where.size)
    parts = (np.concatenate(values), np.concatenate(ids), np.asarray(ends))
    sparse = import_module("scipy.sparse")
    return sparse.csr_matrix(parts, shape=(len(texts), FEATURES.buckets))


def _refuse_few(known: NDArray[Any], part: NDArray[Any], targets: Sequence[str]) -> None:
    counts = np.bincount(known[part != _CALIBRATES], minlength=len(targets))
    if few := [name for name, count in zip(targets, counts, strict=True) if count < 2 * PARTS]:
        raise CoterieError(
            f"expected at least {PARTS} texts of each label beside those held out, found fewer of "
            f"{', '.join(few)}; add texts, or give texts of different origin different groups"
        )


def _regression() -> Any:
    """(rows, answers) to weights [labels, buckets] and bias [labels]. Raises CoterieError."""
    try:
        linear_model = import_module("sklearn.linear_model")
        threads = import_module("threadpoolctl")
    except ImportError as error:
        raise CoterieError(
            f"training needs scikit-learn, and {error.name} is not installed: "
            'pip install "coterie[train]"'
        ) from error

    def fit(rows: Any, answers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        # Buckets that nothing falls into keep the weight 0.
        used = np.flatnonzero(rows.getnnz(axis=0))
        counts = np.bincount(answers)
        evened = (counts.mean() / counts) ** _EVENING
        model = linear_model.LogisticRegression(C=_INVERSE_PENALTY, max_iter=_MOST_ROUNDS, tol=1e-5)
        # One thread: with several, sums are taken in another order every time.
        with warnings.catch_warnings(), threads.threadpool_limits(1):
            # It is meant to stop there: later rounds gain nothing on texts that it has not seen.
            warnings.simplefilter("ignore")
            model.fit(rows[:, used], answers, sample_weight=evened[answers])
        weights = np.zeros((counts.size, rows.shape[1]), dtype=np.float32)
        weights[:, used] = model.coef_
        return weights, model.intercept_

    return fit
