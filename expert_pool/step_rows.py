"""Which sequence chose which experts in a step: counted as layers are asked, read at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from core.step import SequencePart
from expert_pool.tables import IntArray

MOST_SEQUENCES: Final = 16
"""Of one step, or fewer where memory is short; the longest parts come first."""


class StepRows:
    """Counts by (sequence, layer, expert) of one step, in one table that is used again."""

    def __init__(self, num_layers: int, num_experts: int, memory_bytes: int) -> None:
        affordable = memory_bytes // (4 * num_layers * num_experts)
        self._most = max(1, min(MOST_SEQUENCES, affordable))
        self._shape = (num_layers, num_experts)
        self._counts: npt.NDArray[np.int32] = np.zeros((0, num_layers, num_experts), np.int32)
        self._parts: list[SequencePart] = []
        self._place_of_row: IntArray = np.zeros(0, np.int64)
        """Number of a row's sequence among those looked at; their number for all others."""
        self._experts = np.arange(num_experts)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._counts.nbytes

    def begin(self, parts: Sequence[SequencePart], first: int) -> None:
        """The parts of the step's flattened batch, in order, those without a label too.

        Of equally long ones, number `first` and those after it are looked at first.
        """
        if self._parts:
            self._counts.fill(0)  # a step that broke off was not read
        labelled = [at for at, part in enumerate(parts) if part.domain or part.session]
        number = len(parts)
        labelled.sort(key=lambda at: (-len(parts[at].token_ids), (at - first) % number))
        chosen = labelled[: self._most]
        self._parts = [parts[at] for at in chosen]
        places = np.full(number, len(chosen), np.int64)
        places[chosen] = np.arange(len(chosen))
        self._place_of_row = np.repeat(places, [len(part.token_ids) for part in parts])
        if len(self._counts) < len(chosen):
            self._counts = np.zeros((len(chosen), *self._shape), np.int32)

    def note(self, layer: int, counts: IntArray, rows: IntArray) -> None:
        """A layer is asked: each expert `counts` times; `rows` of the batch, sorted by expert."""
        number = len(self._parts)
        width = counts.size
        places = self._place_of_row.take(rows, mode="clip")
        places *= width
        places += np.repeat(self._experts[:width], counts)
        found = np.bincount(places, minlength=(number + 1) * width)
        self._counts[:number, layer, :width] += found[: number * width].reshape(number, width)

    def take(self) -> Iterator[tuple[SequencePart, IntArray]]:
        """Each sequence's part, and its counts [layers, experts]; the table is empty afterwards."""
        for at, part in enumerate(self._parts):
            counts = self._counts[at]
            yield part, counts.astype(np.int64)
            counts.fill(0)
        self._parts = []
