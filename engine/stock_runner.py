"""Runs step plans on transformers' own caches, one sequence at a time.

The reference that every other runner is compared with, and the production path of families with
state layers, whose recurrent state must never meet another sequence's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from core.step import SequencePart, StepPlan
from engine.backbone import Backbone
from expert_pool.layer_major import layer_major


@dataclass(slots=True)
class _Sequence:
    """One sequence's cache and how many tokens have passed."""

    cache: Any
    tokens: int = 0


class _MiniMaxStateCache(MiniMaxCache):
    """MiniMax's cache, told which layer counts tokens.

    Stock asks layer 0, which holds no tokens where it is a linear one (as in the released
    models), and then masks a second prompt part as if it were the first.
    """

    def __init__(self, attention_layer: int) -> None:
        super().__init__()
        self._attention_layer = attention_layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held, asked of a layer that counts them."""
        return int(super().get_seq_length(max(layer_idx, self._attention_layer)))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys, offset) of the mask, asked of a layer that counts tokens."""
        keys, offset = super().get_mask_sizes(query_length, max(layer_idx, self._attention_layer))
        return keys, offset


class StockRunner:
    """Holds one stock cache for each live sequence."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._sequences: dict[int, _Sequence] = {}

    @property
    def sequence_ids(self) -> frozenset[int]:
        """Sequences that hold a cache now."""
        return frozenset(self._sequences)

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Passes each part through the model; logits [rows, V], those of each part together:
        first its scored rows, then the one to sample from.

        Raises ValueError for a part that does not continue where its sequence stands, and for a
        second prompt part of a family that takes whole prompts only.
        """
        self.release(plan.released)
        rows = []
        first_row = 0
        with torch.inference_mode():
            for part in plan.parts:
                self._backbone.experts.row_offset = first_row
                first_row += len(part.token_ids)
                with layer_major() if plan.layer_major else nullcontext():
                    logits = self._run_part(part)
                if part.wants_logits or part.scored[1]:
                    rows.append(logits)
        if not rows:
            vocab_size = self._backbone.shape.vocab_size
            return torch.empty(
                (0, vocab_size), dtype=self._backbone.dtype, device=self._backbone.device
            )
        return torch.cat(rows)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Drops the caches of sequences that ended or were preempted; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def _run_part(self, part: SequencePart) -> torch.Tensor:
        sequence = self._sequence_of(part)
        device = self._backbone.device
        count = len(part.token_ids)
        input_ids = torch.tensor([part.token_ids], device=device)
        wanted = [position - part.start for position in range(*part.scored)]
        if part.wants_logits:
            wanted.append(count - 1)
        positions = torch.arange(part.start, part.start + count, device=device).unsqueeze(0)
        outputs = self._backbone.model(
            input_ids=input_ids,
            position_ids=positions,
            cache=sequence.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(wanted, device=device) if part.scored[1] else 1,
        )
        sequence.tokens = part.start + count
        logits: torch.Tensor = outputs.logits[0]
        return logits

    def _sequence_of(self, part: SequencePart) -> _Sequence:
        if part.start == 0:
            # A preempted sequence starts again from nothing.
            self._sequences[part.sequence_id] = _Sequence(self._new_cache())
        sequence = self._sequences.get(part.sequence_id)
        held = 0 if sequence is None else sequence.tokens
        if sequence is None or held != part.start:
            raise ValueError(
                f"sequence {part.sequence_id} holds {held} tokens, its part starts at {part.start}."
            )
        if self._backbone.whole_prompt_only and part.start and len(part.token_ids) > 1:
            raise ValueError(
                f"{self._backbone.shape.model_type} takes a prompt in one part only, found a "
                f"second part of {len(part.token_ids)} tokens at {part.start}."
            )
        return sequence

    def _new_cache(self) -> Any:
        config = self._backbone.model.config
        if config.model_type == "minimax":
            return _MiniMaxStateCache(config.layer_types.index("full_attention"))
        return DynamicCache(config=config)
