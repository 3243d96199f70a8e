"""How well a domain classifier does on labelled texts: by domain, by length, and how calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Column, Table

from app.domain_records import Progress, Record, RecordError
from deployments.domain_classifier import DomainClassifier
from deployments.domain_settings import UNKNOWN

CUTS: tuple[int | None, ...] = (None, 300, 100)
"""First characters that are looked at; None is all of a text."""
_BINS = 15


@dataclass(frozen=True, slots=True)
class DomainScore:
    """Of the texts of one domain."""

    texts: int
    accuracy: float
    """Share that is guessed right; a text that is not guessed at is not right."""
    unknown: float
    """Share that is not guessed at."""


@dataclass(frozen=True, slots=True)
class CutReport:
    """Of all texts, or of their first `chars` characters."""

    chars: int | None
    texts: int
    accuracy: float
    unknown: float
    calibration_error: float
    """Between confidence and accuracy, over equal bins (expected calibration error, Guo 2017)."""
    domains: dict[str, DomainScore]
    confusion: dict[str, dict[str, int]]
    """By label, then by guess; what does not occur is left out."""

    def as_json(self) -> dict[str, Any]:
        """Plain objects."""
        return asdict(self)


def report(
    classifier: DomainClassifier, records: Sequence[Record], progress: Progress
) -> list[CutReport]:
    """For each cut. Raises RecordError for a label that the classifier does not know."""
    names = [*classifier.labels, UNKNOWN]
    strange = sorted({record.label for record in records} - set(names))
    if strange or not records:
        raise RecordError(
            f"expected texts labelled {', '.join(names)}, found {', '.join(strange) or 'no text'}"
        )
    known = np.array([names.index(record.label) for record in records])
    return [
        _of_cut(classifier, records, known, chars, progress, number)
        for number, chars in enumerate(CUTS)
    ]


def _of_cut(
    classifier: DomainClassifier,
    records: Sequence[Record],
    known: NDArray[np.int64],
    chars: int | None,
    progress: Progress,
    number: int,
) -> CutReport:
    names = [*classifier.labels, UNKNOWN]
    guessed = np.empty_like(known)
    sure = np.empty(known.size)
    best = np.empty_like(known)
    for place, record in enumerate(records):
        if place % 500 == 0:
            progress("guessing", number * known.size + place, len(CUTS) * known.size)
        row = classifier.probabilities(record.text[:chars])
        best[place] = row.argmax()
        sure[place] = row[best[place]]
        guessed[place] = names.index(classifier.verdict(row).domain or UNKNOWN)
    domains = {}
    confusion = {}
    for label in sorted(set(known.tolist())):
        own = guessed[known == label]
        domains[names[label]] = DomainScore(
            texts=int(own.size),
            accuracy=_share(own == label),
            unknown=_share(own == len(names) - 1),
        )
        confusion[names[label]] = {
            names[other]: int(count) for other, count in enumerate(np.bincount(own)) if count
        }
    return CutReport(
        chars=chars,
        texts=int(known.size),
        accuracy=_share(guessed == known),
        unknown=_share(guessed == len(names) - 1),
        calibration_error=round(calibration_error(sure, best == known), 4),
        domains=domains,
        confusion=confusion,
    )


def calibration_error(sure: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Mean distance between confidence and accuracy over bins of equal width."""
    bins = np.minimum((sure * _BINS).astype(np.int64), _BINS - 1)
    counts = np.bincount(bins, minlength=_BINS)
    gaps = np.bincount(bins, weights=sure - right, minlength=_BINS)
    return float(np.abs(gaps).sum() / max(1, counts.sum()))


def _share(flags: NDArray[np.bool_]) -> float:
    return round(float(flags.mean()), 4) if flags.size else 0.0


def tables(reports: Sequence[CutReport]) -> list[Table]:
    """For people: accuracy by domain and cut, then what the whole texts are taken for."""
    scores = Table(Column("domain", no_wrap=True), box=None, pad_edge=False)
    scores.add_column("texts", justify="right")
    for each in reports:
        name = "whole" if each.chars is None else f"first {each.chars}"
        scores.add_column(name, justify="right", no_wrap=True)
    for domain, score in reports[0].domains.items():
        cells = [f"{each.domains[domain].accuracy:.2%}" for each in reports]
        scores.add_row(domain, str(score.texts), *cells)
    total = str(reports[0].texts)
    scores.add_row("all", total, *[f"{each.accuracy:.2%}" for each in reports], style="bold")
    scores.add_row("no guess", "", *[f"{each.unknown:.2%}" for each in reports])
    scores.add_row("calibration error", "", *[f"{each.calibration_error:.4f}" for each in reports])
    whole = reports[0].confusion
    guesses = sorted({guess for row in whole.values() for guess in row})
    confusion = Table(Column("label", no_wrap=True), box=None, pad_edge=False)
    for guess in guesses:
        confusion.add_column(guess, justify="right", no_wrap=True)
    for label, row in whole.items():
        confusion.add_row(label, *[str(row.get(guess, "")) for guess in guesses])
    return [scores, confusion]
