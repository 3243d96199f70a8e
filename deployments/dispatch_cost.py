"""What a request would cost at a replica, in seconds: its own and those of all it delays.

Plain arithmetic on a replica's report and on what was sent there since. A decode step of n
sequences takes step_s + n * sequence_s and the misses of each; so whoever joins n others pays for
a step of n + 1 as long as its answer lasts, waits for the prompts before its own, and makes each
of the n wait for its prompt, its place in the step and its misses.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.replica_report import ReplicaReport
from deployments.sent_requests import Local

NEVER_S = 1e6
"""Cost of a replica that can never hold the sequence: it comes after all others."""
MISS_WEIGHT = 2.0
"""Reads that a missing expert causes: its own, and that of the expert whose slot it takes, which
another sequence asks for again. In simulation (benchmarks/dispatch.py) 3 saves as much and queues
more at some loads, 1 saves a third less."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What a replica's steps cost; see `ReplicaReport`."""

    step_s: float
    sequence_s: float
    prefill_token_s: float
    cold_token_s: float


UNKNOWN = Coefficients(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is: its report, and what this gateway did since."""

    sequences: float
    """Running and waiting."""
    prompt_tokens: float
    kv_free_tokens: float
    kv_tokens: float
    max_sequences: float
    hit_rate: float

    @classmethod
    def of(
        cls, report: ReplicaReport | None, local: Local, tokens: float, places: float = 0.0
    ) -> Load:
        """`tokens` is what each unseen sequence may still write.

        Without a report there are taken to be `places` for sequences; 0 is no bound.
        """
        if report is None:
            return cls(float(local.open), float(local.unseen_prompt_tokens), 0.0, 0.0, places, 0.0)
        return cls(
            max(0.0, report.running + report.waiting + local.unseen - local.ended),
            report.prompt_tokens + local.unseen_prompt_tokens,
            report.kv_free_tokens - local.unseen_prompt_tokens - local.unseen * tokens,
            report.kv_tokens,
            report.max_sequences,
            report.hit_rate,
        )


@dataclass(frozen=True, slots=True)
class Price:
    """The parts of a cost, in seconds."""

    load_s: float
    """All but misses, and nothing of the prompt computed before."""
    cold_s: float
    """Added if none of the request's experts had a slot, times `MISS_WEIGHT`."""
    reuse_s: float
    """Saved because the prompt's beginning lies there."""
    waits_s: float = 0.0
    """The part of `load_s` in which it waits for a place."""


def price(
    prompt_tokens: float,
    tokens: float,
    sequences: int,
    reused_tokens: float,
    load: Load,
    costs: Coefficients,
    answer_tokens: float,
) -> Price:
    """Of a request of `sequences` answers of `tokens` tokens each; others write `answer_tokens`."""
    others = load.sequences
    if load.max_sequences > 0:
        others = min(others, max(load.max_sequences - 1, 0.0))
    step_s = costs.step_s + costs.sequence_s * (others + sequences)
    step_s += costs.cold_token_s * others * (1.0 - load.hit_rate)
    own_prefill_s = prompt_tokens * costs.prefill_token_s
    # What runs now ends evenly over the time that all of it still takes.
    round_s = answer_tokens * step_s
    waits_s = max(
        _share_to_end(load.sequences + sequences - load.max_sequences, load.max_sequences),
        _share_to_end(
            prompt_tokens + sequences * tokens - load.kv_free_tokens,
            load.kv_tokens - max(load.kv_free_tokens, 0.0) if load.kv_tokens else 0.0,
        ),
    )
    load_s = load.prompt_tokens * costs.prefill_token_s + own_prefill_s + waits_s * round_s
    load_s += tokens * step_s
    load_s += others * (own_prefill_s + tokens * sequences * costs.sequence_s)
    if load.kv_tokens and prompt_tokens + 1 > load.kv_tokens:
        load_s += NEVER_S
    return Price(
        load_s,
        MISS_WEIGHT * tokens * sequences * costs.cold_token_s * (1.0 + others),
        min(reused_tokens, prompt_tokens) * costs.prefill_token_s * (1.0 + others),
        waits_s * round_s,
    )


def _share_to_end(missing: float, held: float) -> float:
    """Which part of those who hold something must end before `missing` of it is free."""
    return missing / held if missing > 0 and held > 0 else 0.0
