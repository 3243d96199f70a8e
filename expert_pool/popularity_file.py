"""Popularity on disk: one file a model, named by its content; everyone's, and by domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from core.errors import CheckpointError
from core.whole_file import write_whole
from expert_pool.popularity import Popularity

FORMAT: Final = "coterie-popularity-2"
_WITHOUT_DOMAINS: Final = "coterie-popularity-1"
MAX_DOMAINS: Final = 32
"""So many domains are kept; those with the fewest tokens go."""
_LARGEST: Final = 1e30
"""Larger numbers than a decayed count can reach, which single precision still holds."""


@dataclass(slots=True)
class StoredUse:
    """What a model's experts were used for."""

    everyone: Popularity
    domains: dict[str, Popularity] = field(default_factory=dict)


def save(use: StoredUse, path: Path, content_key: str) -> None:
    """Write to `path`, whole or not at all. `content_key` names the model's content."""
    names = sorted(use.domains, key=lambda name: (-use.domains[name].tokens.sum(), name))
    kept = [use.domains[name] for name in names[:MAX_DOMAINS]]
    layers, experts = use.everyone.counts.shape
    counts = np.zeros((len(kept), layers, experts), np.float32)
    tokens = np.zeros((len(kept), layers))
    for at, popularity in enumerate(kept):
        counts[at], tokens[at] = popularity.counts, popularity.tokens
    values = {
        "format": np.array(FORMAT),
        "content_key": np.array(content_key),
        "half_life_tokens": np.array(use.everyone.half_life_tokens),
        "counts": use.everyone.counts.astype(np.float32),
        "tokens": use.everyone.tokens,
        "domains": np.array(names[:MAX_DOMAINS], dtype=np.str_),
        "domain_counts": counts,
        "domain_tokens": tokens,
    }
    # Losing the last minute to a power failure costs nothing; waiting for the disk costs a step.
    write_whole(path, lambda stream: np.savez(stream, **values), durable=False)  # type: ignore[arg-type]


def load(path: Path, content_key: str) -> StoredUse:
    """Read what `save` wrote, or an earlier version, without domains.

    Raises CheckpointError for anything else: another model's, one that is damaged in whatever way,
    no such file.
    """
    try:
        with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
    # Zip and array headers of a damaged file may say anything, and raise as much.
    except Exception as error:
        raise CheckpointError(f"{path}: not a popularity file: {error}") from error
    known = str(found.get("format")) in (FORMAT, _WITHOUT_DOMAINS)
    if not known or str(found.get("content_key")) != content_key:
        raise CheckpointError(
            f"{path}: expected {FORMAT} of model content {content_key}, found "
            f"{found.get('format')} of {found.get('content_key')}; delete it"
        )
    try:
        everyone = _checked(found["counts"], found["tokens"], float(found["half_life_tokens"]))
        return StoredUse(everyone, _domains(found, everyone))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged popularity file: {error}") from error


def _domains(found: Mapping[str, npt.NDArray[Any]], everyone: Popularity) -> dict[str, Popularity]:
    if str(found["format"]) == _WITHOUT_DOMAINS:
        return {}
    names, counts, tokens = (found[key] for key in ("domains", "domain_counts", "domain_tokens"))
    expected = (len(names), *everyone.counts.shape)
    if names.dtype.kind != "U" or len(names) > MAX_DOMAINS or counts.shape != expected:
        raise ValueError(f"domains {names.dtype} of shape {counts.shape}, expected {expected}")
    half_life_tokens = everyone.half_life_tokens
    return {
        str(name): _checked(counts[at], tokens[at], half_life_tokens)
        for at, name in enumerate(names)
    }


def _checked(
    counts: npt.NDArray[Any], tokens: npt.NDArray[Any], half_life_tokens: float
) -> Popularity:
    counts, tokens = counts.astype(np.float64), tokens.astype(np.float64)
    if counts.ndim != 2 or tokens.shape != counts.shape[:1]:
        raise ValueError(f"counts of shape {counts.shape}, tokens of {tokens.shape}")
    for values in (counts, tokens, half_life_tokens):
        # One that is not a number would stay for ever, whatever is added to it.
        if not (np.all(values >= 0) and np.all(values <= _LARGEST)):
            raise ValueError(f"expected numbers from 0 to {_LARGEST:g}")
    popularity = Popularity(counts.shape[0], counts.shape[1], half_life_tokens)
    popularity.counts[:] = counts
    popularity.tokens[:] = tokens
    return popularity
