"""A step's nouns: what the batcher plans, what the engine ran, what came out.

All are msgspec structs: the rank sends a `StepResult` to its supervisor as one message a step.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "error"]


class SequencePart(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive tokens of one sequence that pass the model in one step."""

    sequence_id: int
    start: int
    """Position of the first token; tokens before it already lie in the KV pages."""
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    """The sequence's KV blocks, enough for positions 0 .. start + len(token_ids) - 1."""
    is_decode: bool
    wants_logits: bool
    """True where the last token's logits are to be sampled from."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. A log of plans alone suffices to replay a run (exactness level R)."""

    parts: tuple[SequencePart, ...]
    released: tuple[int, ...] = ()
    """Sequences whose state (pages, stock cache) was dropped since the step before."""
    layer_major: bool = False
    """True when whole prompts pass one layer at a time (a later choice of the batcher)."""

    @property
    def num_tokens(self) -> int:
        """Tokens that pass the model in this step."""
        return sum(len(part.token_ids) for part in self.parts)


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of a chosen token and of the likeliest `(token, logprob)` pairs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one sequence of a request."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    """New tokens, in order. An EOS or stop token that ended the sequence is not among them."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where asked for, else empty."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_type: str | None = None
    """Name of the class in core.errors, with finish_reason "error"."""
    completion_tokens: int = 0
    """Sampled so far, an ending EOS included."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""


class PoolStepStats(msgspec.Struct, kw_only=True):
    """What the expert pool counted in one step."""

    demand_hits: int = 0
    demand_misses: int = 0
    """hits + misses = distinct (layer, expert) asked for in the step."""
    routed_pairs: int = 0
    """(token, chosen expert) pairs over all MoE layers; tokens x k x layers when all were good."""
    bytes_read: int = 0
    records_read: int = 0
    evictions: int = 0
    waves: int = 0
    """Passes over the slots; equals the number of MoE layers run when nothing had to be split."""
    stall_s: float = 0.0
    """Seconds in which no resident expert was left to compute and a read was awaited."""
    rereads: int = 0
    """Records read again after a failed checksum or read."""
    bad_rows: tuple[int, ...] = ()
    """Rows of the flattened batch whose routing was NaN, infinite or out of range."""
    failed_rows: tuple[int, ...] = ()
    """Rows that needed an expert which could not be read (quarantined)."""


class StepStats(msgspec.Struct, kw_only=True):
    """One step in numbers; metrics, ledger and reports are made from these."""

    step: int
    step_s: float
    decode_tokens: int = 0
    prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    kv_blocks_used: int = 0
    """Blocks that a live sequence holds; cached, unreferenced prefix blocks count as free."""
    kv_blocks_total: int = 0
    prefix_hit_tokens: int = 0
    pool: PoolStepStats = msgspec.field(default_factory=PoolStepStats)


class StepResult(msgspec.Struct, kw_only=True):
    """Everything that a step sends upwards."""

    outputs: tuple[SequenceOutput, ...]
    stats: StepStats
