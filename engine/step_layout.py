"""A step's index tensors: made once a step with numpy, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from core.step import SequencePart, StepPlan
from engine.attention_layout import Window

Ints = npt.NDArray[np.int64]
Rows = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call over gathered pages, but for its queries."""

    table: torch.Tensor
    """[blocks] KV block ids to gather."""
    raw: torch.Tensor
    """[blocks, block_tokens, width] scratch that they are gathered to."""
    wide: torch.Tensor | None
    """The same in the dtype that is computed in, where it is another one."""
    key: torch.Tensor
    """[count, Hkv, keys, D] view of the gathered."""
    value: torch.Tensor
    """[count, Hkv, keys, Dv] view of the gathered."""
    mask: torch.Tensor
    """[count, 1, queries, keys] additive."""


@dataclass(slots=True)
class Span:
    """Queries that attend in one call: all of one bucket's decode rows, or one prompt part.

    Each of the `rows` queries of `count` sequences sees keys from the same number of blocks.
    """

    rows: Rows
    count: int
    """Sequences in the call."""
    queries: int
    """Query tokens of each sequence."""
    table: torch.Tensor
    """[count * blocks] KV block ids to gather."""
    blocks: int
    """KV blocks gathered for each sequence."""
    first_key: Ints
    """[count] position of the first gathered key."""
    positions: Ints
    """[count, queries] position of each query."""
    fresh_causal: bool
    """A prompt beginning: its own new keys suffice, without any gather."""
    calls: dict[tuple[int, ...], Call] = field(default_factory=dict)
    """By K/V geometry: what the first layer of the step prepared for the next ones."""

    def visible(self, window: Window, first: int, keys: int) -> npt.NDArray[np.bool_]:
        """[count, queries, keys]: which of `keys` keys from the `first` gathered one are seen."""
        key = (self.first_key[:, None] + np.arange(first, first + keys))[:, None, :]
        query = self.positions[:, :, None]
        return (key <= query) & (key >= window.first_visible(query))


@dataclass(slots=True)
class StepLayout:
    """Everything about one step that does not depend on the layer's weights."""

    num_tokens: int
    input_ids: torch.Tensor
    """[1, T]"""
    position_ids: torch.Tensor
    """[1, T]"""
    slots: torch.Tensor
    """[T] page slot (block * block_tokens + offset) that each new token's K/V go to."""
    logit_rows: torch.Tensor
    """[rows] of the flattened batch: for each part its scored ones, then the last if wanted."""
    parts: tuple[SequencePart, ...]
    row_starts: tuple[int, ...]
    block_tokens: int
    device: torch.device
    spans: dict[Window, list[Span]] = field(default_factory=dict)

    def spans_for(self, window: Window) -> list[Span]:
        """The attention calls of a layer with this window, planned at first use in the step."""
        spans = self.spans.get(window)
        if spans is None:
            spans = self.spans[window] = list(self._plan(window))
        return spans

    def _plan(self, window: Window) -> list[Span]:
        single: list[int] = []
        spans: list[Span] = []
        for number, part in enumerate(self.parts):
            if len(part.token_ids) == 1:
                single.append(number)
            else:
                spans.append(self._prompt_span(number, window))
        return self._decode_spans(single, window) + spans

    def _decode_spans(self, numbers: Seq[int], window: Window) -> list[Span]:
        """One span for each power-of-two bucket of visible blocks."""
        if not numbers:
            return []
        parts = [self.parts[n] for n in numbers]
        positions = np.array([part.start for part in parts], dtype=np.int64)
        first_block = window.first_visible(positions) // self.block_tokens
        num_blocks = positions // self.block_tokens - first_block + 1
        buckets = np.ceil(np.log2(num_blocks)).astype(np.int64)
        starts = np.array([self.row_starts[n] for n in numbers], dtype=np.int64)
        spans = []
        for bucket in np.unique(buckets):
            members = np.flatnonzero(buckets == bucket)
            blocks = int(num_blocks[members].max())
            table = np.zeros((len(members), blocks), dtype=np.int64)
            for line, member in enumerate(members):
                begin, count = int(first_block[member]), int(num_blocks[member])
                table[line, :count] = parts[member].block_ids[begin : begin + count]
                table[line, count:] = table[line, 0]
            spans.append(
                Span(
                    rows=self._rows(starts[members]),
                    count=len(members),
                    queries=1,
                    table=self._tensor(table.reshape(-1)),
                    blocks=blocks,
                    first_key=first_block[members] * self.block_tokens,
                    positions=positions[members, None],
                    fresh_causal=False,
                )
            )
        return spans

    def _prompt_span(self, number: int, window: Window) -> Span:
        part, start = self.parts[number], self.row_starts[number]
        count = len(part.token_ids)
        positions = np.arange(part.start, part.start + count, dtype=np.int64)
        first_visible = window.first_visible(positions)
        first_block = int(first_visible[0]) // self.block_tokens
        last_block = int(positions[-1]) // self.block_tokens
        table = np.array(part.block_ids[first_block : last_block + 1], dtype=np.int64)
        return Span(
            rows=slice(start, start + count),
            count=1,
            queries=count,
            table=self._tensor(table),
            blocks=len(table),
            first_key=np.array([first_block * self.block_tokens]),
            positions=positions[None],
            fresh_causal=part.start == 0 and not first_visible.any(),
        )

    def _rows(self, rows: Ints) -> Rows:
        first = int(rows[0])
        if np.array_equal(rows, np.arange(first, first + len(rows))):
            return slice(first, first + len(rows))
        return self._tensor(rows)

    def _tensor(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


class StepLayoutBuilder:
    """Lays a StepPlan out as flattened tensors on buffers that live as long as the runner."""

    def __init__(self, max_step_tokens: int, block_tokens: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self._device = device
        self._host = torch.zeros((3, max_step_tokens), dtype=torch.long)
        self._host_view = self._host.numpy()
        self._buffer = self._host if device.type == "cpu" else self._host.to(device)

    def build(self, plan: StepPlan) -> StepLayout:
        """Raises ValueError where the plan has more tokens than were reserved at start."""
        total = plan.num_tokens
        if total > self._host.shape[1]:
            raise ValueError(f"expected at most {self._host.shape[1]} tokens a step, found {total}")
        ids, positions, slots = self._host_view
        row, row_starts = 0, []
        logit_rows: list[int] = []
        size = self._block_tokens
        for part in plan.parts:
            count = len(part.token_ids)
            end = row + count
            row_starts.append(row)
            if count == 1:
                ids[row] = part.token_ids[0]
                positions[row] = part.start
                slots[row] = part.block_ids[part.start // size] * size + part.start % size
            else:
                ids[row:end] = part.token_ids
                where = np.arange(part.start, part.start + count, dtype=np.int64)
                positions[row:end] = where
                blocks = np.array(part.block_ids, dtype=np.int64)
                slots[row:end] = blocks[where // size] * size + where % size
            logit_rows += (row + position - part.start for position in range(*part.scored))
            if part.wants_logits:
                logit_rows.append(end - 1)
            row = end
        if self._buffer is not self._host:
            self._buffer[:, :total].copy_(self._host[:, :total])
        return StepLayout(
            num_tokens=total,
            input_ids=self._buffer[0, :total].unsqueeze(0),
            position_ids=self._buffer[1, :total].unsqueeze(0),
            slots=self._buffer[2, :total],
            logit_rows=torch.tensor(logit_rows, dtype=torch.long, device=self._device),
            parts=plan.parts,
            row_starts=tuple(row_starts),
            block_tokens=size,
            device=self._device,
        )
