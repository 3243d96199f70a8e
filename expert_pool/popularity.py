"""Decayed counts of use by (layer, expert): one class behind hot lists, domains and predictors."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from core.errors import CheckpointError
from expert_pool.tables import IntArray

FORMAT: Final = "coterie-popularity-1"
_SMALLEST_KEPT: Final = 1e-30


class Popularity:
    """How often each expert was chosen of late. A token's weight halves every `half_life_tokens`.

    Decay counts tokens of the layer. 8 bytes an expert.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life_tokens: float) -> None:
        if half_life_tokens <= 0:
            raise ValueError(f"expected a half life above 0 tokens, found {half_life_tokens}")
        self.half_life_tokens = half_life_tokens
        self.counts: npt.NDArray[np.float64] = np.zeros((num_layers, num_experts))
        self.tokens: npt.NDArray[np.float64] = np.zeros(num_layers)
        """Tokens seen by a layer, decayed as the counts are."""

    def add(
        self,
        layer: int,
        experts: IntArray,
        counts: IntArray | npt.NDArray[np.float64],
        tokens: int,
    ) -> None:
        """`tokens` passed a layer; each of the distinct `experts` was chosen `counts` times.

        They count as simultaneous.
        """
        kept = max(0.5 ** (tokens / self.half_life_tokens), _SMALLEST_KEPT)
        row = self.counts[layer]
        row *= kept
        row[experts] += counts
        self.tokens[layer] = self.tokens[layer] * kept + tokens

    def merge(self, other: Popularity, weight: float = 1.0) -> None:
        """Add another's counts, times `weight`. Raises ValueError where shapes differ."""
        if other.counts.shape != self.counts.shape:
            raise ValueError(
                f"expected counts of shape {self.counts.shape}, found {other.counts.shape}: "
                "popularity belongs to one model"
            )
        self.counts += weight * other.counts
        self.tokens += weight * other.tokens

    def rates(self, layer: int) -> npt.NDArray[np.float64]:
        """Share of tokens that chose each expert; zeros before the first token."""
        rates: npt.NDArray[np.float64] = self.counts[layer] / max(self.tokens[layer], 1e-12)
        return rates

    def hottest(self, layer: int, number: int) -> IntArray:
        """The `number` experts used most, first one first; ties go to the lower number.

        Only experts that were used at all.
        """
        row = self.counts[layer]
        order = np.argsort(-row, kind="stable")[:number]
        return order[row[order] > 0]

    def hot_list(self, slots: IntArray) -> list[tuple[int, int]]:
        """(layer, expert) for `slots` of each layer, most used first over all layers."""
        rated = [
            (-float(self.rates(layer)[expert]), layer, int(expert))
            for layer, number in enumerate(slots)
            for expert in self.hottest(layer, int(number))
        ]
        return [(layer, expert) for _, layer, expert in sorted(rated)]

    def save(self, path: Path, content_key: str) -> None:
        """Write to `path`, whole or not at all. `content_key` names the model's content."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(
                    file,
                    format=np.array(FORMAT),
                    content_key=np.array(content_key),
                    half_life_tokens=np.array(self.half_life_tokens),
                    counts=self.counts.astype(np.float32),
                    tokens=self.tokens,
                )
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, content_key: str) -> Popularity:
        """Read what `save` wrote. Raises CheckpointError for anything else: another model's,
        one that is damaged in whatever way, no such file.
        """
        try:
            with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as stored:
                found = {name: stored[name] for name in stored.files}
        # Zip and array headers of a damaged file may say anything, and raise as much.
        except Exception as error:
            raise CheckpointError(f"{path}: not a popularity file: {error}") from error
        if str(found.get("format")) != FORMAT or str(found.get("content_key")) != content_key:
            raise CheckpointError(
                f"{path}: expected {FORMAT} of model content {content_key}, found "
                f"{found.get('format')} of {found.get('content_key')}; delete it"
            )
        try:
            return cls._of(found)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged popularity file: {error}") from error

    @classmethod
    def _of(cls, found: dict[str, npt.NDArray[Any]]) -> Popularity:
        counts = found["counts"].astype(np.float64)
        tokens = found["tokens"].astype(np.float64)
        if counts.ndim != 2 or tokens.shape != counts.shape[:1]:
            raise ValueError(f"counts of shape {counts.shape}, tokens of {tokens.shape}")
        half_life_tokens = float(found["half_life_tokens"])
        for values in (counts, tokens, half_life_tokens):
            # One that is not a number would stay for ever, whatever is added to it.
            if not (np.isfinite(values).all() and np.all(values >= 0)):
                raise ValueError("expected finite numbers from 0 on")
        layers, experts = counts.shape
        popularity = cls(layers, experts, half_life_tokens)
        popularity.counts[:] = counts
        popularity.tokens[:] = tokens
        return popularity
