"""Linear layers and activations over the rows of several experts, where their slots lie.

For one expert the arithmetic is that of one matrix product over all of its rows, whatever other
experts are computed with it and wherever they lie: what exactness level R rests on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from expert_pool.slots import SlotArena
from expert_pool.tables import IntArray

_GROUPS_A_PRODUCT = 3
"""On a CPU, passing an empty group of a grouped product costs about a third of calling `mm`."""
_VECTOR_VALUES = 128
"""Multiples of so many values leave no vector loop of a CPU a remainder (gate and up halved)."""


@dataclass(frozen=True)
class ExpertGroup:
    """Experts that are computed together: their slots, and their rows one expert after another."""

    arena: SlotArena
    slots: IntArray
    """Ascending."""
    counts: IntArray
    """Rows of each."""
    device: torch.device

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(slot, first row, row after the last) of each expert."""
        stops = np.cumsum(self.counts)
        starts = stops - self.counts
        return list(zip(self.slots.tolist(), starts.tolist(), stops.tolist(), strict=True))

    @cached_property
    def first_slot(self) -> int:
        """Where the view of a grouped product begins."""
        return int(self.slots[0])

    @cached_property
    def span(self) -> int:
        """Slots from the first expert's to the last one's."""
        return int(self.slots[-1]) - self.first_slot + 1

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Row after the last of every slot in the span, int32 as grouped_mm wants them."""
        counts = np.zeros(self.span, dtype=np.int32)
        counts[self.slots - self.first_slot] = self.counts
        return torch.from_numpy(np.cumsum(counts, dtype=np.int32)).to(self.device)

    @cached_property
    def slot_of_row(self) -> torch.Tensor:
        """The slot that each row's expert lies in."""
        return torch.from_numpy(np.repeat(self.slots, self.counts)).to(self.device)

    @cached_property
    def is_grouped(self) -> bool:
        """One grouped product, or one product an expert: the same numbers, a matter of speed."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_capability(self.device) >= (8, 0)
        return self.span <= _GROUPS_A_PRODUCT * self.slots.size

    def linear(self, rows: torch.Tensor, name: str, is_transposed: bool) -> torch.Tensor:
        """`[S, in]` times each row's expert's parameter `name`, plus its bias if there is one.

        The parameter is `[out, in]` for each expert, or `[in, out]` if transposed.
        """
        weight = self.arena.views[name]
        if not is_transposed:
            weight = weight.transpose(-2, -1)
        rows = rows.to(weight.dtype)
        if self.is_grouped and _is_aligned(rows, weight):
            weight = weight[self.first_slot : self.first_slot + self.span]
            out = torch.nn.functional.grouped_mm(rows, weight, offs=self.offsets)
        else:
            out = rows.new_empty((rows.shape[0], weight.shape[-1]))
            for slot, start, stop in self.runs:
                torch.mm(rows[start:stop], weight[slot], out=out[start:stop])
        bias = self.arena.views.get(f"{name}_bias")
        if bias is not None:
            out.add_(bias[self.slot_of_row])
        return out

    def activate(
        self, function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        """`function` over all rows, or expert by expert where that could change the last bit.

        torch's vector loops on a CPU end in a scalar remainder, whose exp differs in the last
        bit. Where remainders fall, at ends and where threads divide the work, depends on the
        number of rows, so on the grouping.
        """
        threads = torch.get_num_threads()
        if self.device.type != "cpu" or (
            threads <= 2 and rows.shape[-1] % (threads * _VECTOR_VALUES) == 0
        ):
            return function(rows)
        return torch.cat([function(rows[start:stop]) for _, start, stop in self.runs])


def _is_aligned(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """grouped_mm takes matrices whose rows are multiples of 16 bytes."""
    return all(
        size * weight.element_size() % 16 == 0 for size in (rows.shape[-1], *weight.shape[1:])
    )
