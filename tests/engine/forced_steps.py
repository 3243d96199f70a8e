"""Sequences with given tokens, cut into step plans, and what stock says about them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from core.step import SequencePart, StepPlan
from tests.models.families import FAMILIES, cached_checkpoint
from tests.models.tiny_checkpoint import VOCAB_SIZE

BLOCK_TOKENS = 8
CONTEXT_TOKENS = 64
"""Beyond every RoPE threshold of the table, and served context of the tests."""


@dataclass(frozen=True)
class Forced:
    """A sequence whose tokens are known, the cuts of its prompt, and the step it begins at."""

    token_ids: tuple[int, ...]
    prompt_parts: tuple[int, ...]
    """Lengths of the prompt's parts; the tokens after them are decoded one a step."""
    first_step: int = 0

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each part, in order."""
        start = 0
        for length in self.prompt_parts:
            yield start, start + length
            start += length
        for position in range(start, len(self.token_ids)):
            yield position, position + 1


def token_ids(seed: int, count: int) -> tuple[int, ...]:
    """`count` ordinary token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(5, VOCAB_SIZE, (count,), generator=generator).tolist())


def plans(sequences: Sequence[Forced]) -> list[StepPlan]:
    """All sequences side by side, every part asking for logits, blocks handed out scattered."""
    blocks_each = -(-CONTEXT_TOKENS // BLOCK_TOKENS)
    steps: dict[int, list[SequencePart]] = {}
    for number, sequence in enumerate(sequences):
        # Neighbouring blocks of a sequence lie apart, and never at block 0 first.
        blocks = [b * len(sequences) + number for b in reversed(range(blocks_each))]
        for step, (start, end) in enumerate(sequence.spans(), start=sequence.first_step):
            part = SequencePart(
                sequence_id=number,
                start=start,
                token_ids=sequence.token_ids[start:end],
                block_ids=tuple(blocks[: -(-end // BLOCK_TOKENS)]),
                is_decode=start >= sum(sequence.prompt_parts),
                wants_logits=True,
            )
            steps.setdefault(step, []).append(part)
    return [
        # Decode parts lead, as in the batcher's plans.
        StepPlan(parts=tuple(sorted(steps[step], key=lambda part: not part.is_decode)))
        for step in sorted(steps)
    ]


@functools.cache
def stock_model(family: str, dtype: str) -> torch.nn.Module:
    """The family's checkpoint through stock from_pretrained. Callers must not change it."""
    path = cached_checkpoint(family, dtype)
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


@functools.cache
def stock_logits(family: str, token_ids: tuple[int, ...]) -> torch.Tensor:
    """[T, V] teacher-forced fp32 logits of stock, with the RoPE factors of the served context.

    Where factors depend on the longest sequence of a batch, stock is shown the same tokens with
    others behind them up to the served context; causality keeps these from mattering otherwise.
    """
    shown = token_ids
    if FAMILIES[family].rope_threshold_tokens is not None:
        shown = token_ids + (7,) * (CONTEXT_TOKENS - len(token_ids))
    with torch.inference_mode():
        logits: torch.Tensor = stock_model(family, "float32")(torch.tensor([shown])).logits
    return logits[0, : len(token_ids)]
