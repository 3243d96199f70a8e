"""Decayed counts of use by (layer, expert): one class behind hot lists, domains and predictors."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from expert_pool.tables import IntArray

_SMALLEST_KEPT: Final = 1e-30


class Popularity:
    """How often each expert was chosen of late. A token's weight halves every `half_life_tokens`.

    Decay counts tokens of the layer. 8 bytes an expert; 4 with `dtype` float32.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        half_life_tokens: float,
        dtype: npt.DTypeLike = np.float64,
    ) -> None:
        if half_life_tokens <= 0:
            raise ValueError(f"expected a half life above 0 tokens, found {half_life_tokens}")
        self.half_life_tokens = half_life_tokens
        self.counts: npt.NDArray[np.float64] = np.zeros((num_layers, num_experts), dtype)
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

    def add_all(
        self, counts: npt.NDArray[np.floating] | IntArray, tokens: npt.NDArray[np.floating]
    ) -> None:
        """`add` for all layers at once: `counts` [layers, experts], `tokens` [layers]."""
        kept = np.maximum(0.5 ** (tokens / self.half_life_tokens), _SMALLEST_KEPT)
        self.counts *= kept[:, None]
        self.counts += counts
        self.tokens *= kept
        self.tokens += tokens

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

    def in_single(self) -> Popularity:
        """A copy in float32."""
        layers, experts = self.counts.shape
        copy = Popularity(layers, experts, self.half_life_tokens, np.float32)
        copy.counts[:], copy.tokens[:] = self.counts, self.tokens
        return copy

    def all_rates(self) -> npt.NDArray[np.float64]:
        """`rates` of all layers, [layers, experts]."""
        rates: npt.NDArray[np.float64] = self.counts / np.maximum(self.tokens, 1e-12)[:, None]
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
