"""One row of figures from the samples of a load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.load.sample import Sample


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must meet to count as good, in milliseconds."""

    ttft_ms: float
    tpot_ms: float


def summarise(
    samples: Sequence[Sample], objectives: Objectives, clients: int | None, rate: float | None
) -> dict[str, Any]:
    """A row. Times are over answered requests, tokens a second over the time until the last end.

    `goodput` is the tokens a second of requests that met both objectives; `errors` counts failed
    requests by kind; `lag_p95_ms` is how late requests were sent: well below `ttft_p50_ms`, or the
    machine that sends is what was measured.
    """
    answered = [sample for sample in samples if sample.ok]
    began_s = min((x.due_s for x in samples), default=0.0)
    seconds = max((x.ended_s for x in samples), default=0.0) - began_s
    good = [x for x in answered if x.meets(objectives.ttft_ms, objectives.tpot_ms)]
    ttft_ms = [x.ttft_s * 1e3 for x in answered]
    tpot_ms = [tpot_s * 1e3 for x in answered if (tpot_s := x.tpot_s) is not None]
    return {
        "clients": clients,
        "rate": rate,
        "tok_s": _per_second(answered, seconds),
        "ttft_p50_ms": percentile(ttft_ms, 50),
        "ttft_p95_ms": percentile(ttft_ms, 95),
        "tpot_p50_ms": percentile(tpot_ms, 50),
        "tpot_p95_ms": percentile(tpot_ms, 95),
        "goodput": _per_second(good, seconds),
        "errors": dict(sorted(Counter(x.error for x in samples if x.error).items())),
        "requests": len(samples),
        "seconds": round(seconds, 3),
        "prompt_tokens": _mean([x.prompt_tokens for x in answered]),
        "output_tokens": _mean([x.output_tokens for x in answered]),
        "lag_p95_ms": percentile([(x.sent_s - x.due_s) * 1e3 for x in samples], 95),
    }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` of `values` do not exceed; None without any."""
    if not values:
        return None
    rank = max(1, math.ceil(len(values) * percent / 100))
    return round(sorted(values)[rank - 1], 3)


def _per_second(samples: Sequence[Sample], seconds: float) -> float:
    return round(sum(x.output_tokens for x in samples) / seconds, 2) if seconds > 0 else 0.0


def _mean(values: Sequence[int]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None
