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
    scored: tuple[int, int] = (0, 0)
    """Positions [from, to) whose logits score the prompt token after each; the logits come before
    those to sample from. Never the last position of a part that `wants_logits`."""
    tenant: str = ""
    domain: str = ""
    session: str = ""
    """Of the sequence's request: what the pool may learn popularity by. Nothing that is computed
    depends on them."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. A log of plans alone suffices to replay a run (exactness level R)."""

    parts: tuple[SequencePart, ...]
    released: tuple[int, ...] = ()
    """Sequences whose state (pages, stock cache) was dropped since the step before."""
    layer_major: bool = False
    """True when prompts pass one layer at a time, each expert once, sums in order of experts."""

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
    end_token_id: int | None = None
    """The EOS or stop token that ended the sequence, where one did."""
    end_logprob: TokenLogprob | None = None
    """That token's log-probability where asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """The next ones of the prompt's tokens, from its second on, where asked for; only in outputs
    of index 0. All have come when the first of `token_ids` comes."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_type: str | None = None
    """Name of the class in core.errors, with finish_reason "error"."""
    error_param: str | None = None
    """The request field at fault, where an error names one."""
    completion_tokens: int = 0
    """Sampled so far, an ending EOS included."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""


class PrefetchStats(msgspec.Struct, kw_only=True):
    """What reading ahead did in one step, in experts unless their names say otherwise."""

    state: Literal["probing", "on", "off"] = "off"
    """Whether it reads ahead: on trial, because it pays, or not now because it did not."""
    distance_layers: int = 0
    """How far ahead it reads; 0 where every expert has a slot or the setting is "off"."""
    begun: int = 0
    called_off: int = 0
    """Not needed after all, and not yet begun to be read."""
    used: int = 0
    used_bytes: int = 0
    wasted: int = 0
    """Left again before anybody asked for them."""
    wasted_bytes: int = 0
    under_way: int = 0
    """At the end of the step."""
    regretted: int = 0
    """Had made room for others and were asked for next."""
    hidden_s: float = 0.0
    """Stall that there would have been besides, reckoned from measured read times."""
    harm_s: float = 0.0
    """Time that it cost, reckoned: reads in vain while others waited, experts that had to leave,
    and `decide_s`."""
    decide_s: float = 0.0
    """Its own time."""
    net_gain: float = 0.0
    """Share of the time saved in the last full window, less what it cost."""
    recall: dict[str, float] = {}
    """By predictor: share of the experts asked for that its first 2 x asked named; from time to
    time."""


class HintStats(msgspec.Struct, kw_only=True):
    """What hints of coming requests did since the step before, in experts unless said otherwise."""

    state: Literal["probing", "on", "off"] = "off"
    """Whether they are followed: on trial, because it pays, or not now because it did not."""
    received: int = 0
    """Hints that came."""
    begun: int = 0
    """Experts that began to be read for them."""
    useful: int = 0
    """Asked for soon afterwards, and there by then."""
    wasted: int = 0
    """Not asked for soon, or gone again before."""
    regretted: int = 0
    """Had made room for one of them, and were asked for sooner than that one."""
    dropped: int = 0
    """Awaited no more, as the text turned out not to be about its domain."""
    wrong_labels: int = 0
    """Texts found not to be about their domain, by the experts that they use."""


class PoolStepStats(msgspec.Struct, kw_only=True):
    """What the expert pool counted in one step."""

    demand_hits: int = 0
    demand_misses: int = 0
    """hits + misses = distinct (layer, expert) asked for in the step."""
    host_misses: int = 0
    """Demand misses that the host tier served, and those that a disk did; reads that failed or were
    barred count as disk. host + disk = demand_misses, once no pass is between two steps."""
    disk_misses: int = 0
    routed_pairs: int = 0
    """(token, chosen expert) pairs over all MoE layers; tokens x k x layers when all were good."""
    bytes_read: int = 0
    records_read: int = 0
    """From disk, and so are `bytes_read`."""
    host_records: int = 0
    """Experts that came from the host tier (page cache, or memory beside a device), awaited or
    not, and their bytes."""
    host_bytes: int = 0
    resident: int = 0
    """Experts in slots at the end of the step."""
    evictions: int = 0
    returns: int = 0
    """Experts read again within two touches of their layer after they had been evicted."""
    moved_slots: int = 0
    """Slots that went from one layer to another after the step."""
    compared_misses: int = 0
    """Misses of sampled layers in windows of steps whose optimum became known in this step; with
    prefetch, those after it."""
    optimum_misses: int = 0
    """What Belady's optimum would have missed there; the difference is the regret."""
    waves: int = 0
    """Passes over the slots; equals the number of MoE layers run when nothing had to be split."""
    stall_s: float = 0.0
    """Seconds in which no resident expert was left to compute and a read was awaited."""
    read_s: float = 0.0
    """Seconds in which a reader was at work on at least one expert, whether awaited or not."""
    rereads: int = 0
    """Records read again after a failed checksum or read."""
    bad_rows: tuple[int, ...] = ()
    """Rows of the flattened batch whose routing was NaN, infinite or out of range."""
    failed_rows: tuple[int, ...] = ()
    """Rows that needed an expert which could not be read (quarantined)."""
    prefetch: PrefetchStats = msgspec.field(default_factory=PrefetchStats)
    hints: HintStats = msgspec.field(default_factory=HintStats)


class BatchStats(msgspec.Struct, kw_only=True):
    """How many sequences a step might take, and why."""

    sequences: int
    """Most sequences that may run now."""
    prefill_tokens: int
    """Most prompt tokens of this step."""
    reason: str
    """What bound it: "waiting" (nothing but how many there are), "tpot", "ttft" (a first token is
    at risk), "throughput" (no size keeps the objective), "gathering", "bounds", "probing" (too
    little is known yet)."""
    predicted_s: float = 0.0
    """What the model of step times said of this step; 0 while it knows too little."""
    model_error: float = 0.0
    """Mean of |measured - predicted| / measured over the last steps."""
    held_s: float = 0.0
    """Time for which the step was put off so that more sequences share it."""
    overtaken: int = 0
    """Waiting sequences that a younger one passed at this admission."""
    grouping: Literal["off", "probing", "on"] = "off"
    """Whether the waiting are admitted by how their experts overlap with the running ones."""
    grouping_gain: float = 0.0
    """Share of distinct experts that admission in order of arrival would have cost besides."""


class RoutingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of its pool to whoever chooses a replica; sent now and then."""

    hit_rate: float
    """Expected share of a token's experts that have a slot now, whatever the token is about."""
    hit_rate_by_domain: dict[str, float] = {}
    """The same of the tokens of one domain, for the domains that pass here most, and those whose
    popularity is known from earlier runs."""
    miss_s: float = 0.0
    """Measured seconds that one missing expert adds to a step."""


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
    kv_tokens: int = 0
    """Tokens whose keys and values the step's sequences looked at."""
    batch: BatchStats | None = None
    """How the batch was sized, where that is decided anew for each step."""
    routing: RoutingSummary | None = None
    """From time to time: where experts lie, for the dispatcher."""
    pool: PoolStepStats = msgspec.field(default_factory=PoolStepStats)


class StepResult(msgspec.Struct, kw_only=True):
    """Everything that a step sends upwards."""

    outputs: tuple[SequenceOutput, ...]
    stats: StepStats
