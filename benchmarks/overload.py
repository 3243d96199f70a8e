"""An open loop at a multiple of what the service can do: `python -m benchmarks.overload --json`.

First a closed loop with a full batch measures the capacity: answered requests a second, and their
goodput. Then a second service, whose queue holds what can be served in half the TTFT objective,
gets twice that rate as Poisson arrivals for a minute. Right is: the queue stays bounded, goodput
stays within a tenth of the one at capacity, and Retry-After is within a factor of two of how long
those had to wait who got the last free places (requests due within a second of the refusal).

The load generator runs on the same machine and shares its cores. So the rank computes with one
thread (--rank-threads): with as many as there are cores, what it can do would depend on how much
the others need, and more of them is needed under overload.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.load.arrivals import Lengths, TokenRange, open_arrivals
from app.load.client import Target, first_model
from app.load.plan import Load, LoadPlan, run_plan
from app.load.sample import Sample
from app.load.summary import Objectives, percentile, summarise
from app.measurement import QuietMonitor, emit, quiet_monitor
from benchmarks.live_service import live_service

LENGTHS = Lengths(TokenRange(64, 64), TokenRange(64, 64))
NEAR_S = 1.0
"""An answered request due so close to a refusal met the same queue."""
TIMEOUT_S = 300.0


def capacity(url: str, clients: int, seconds: float) -> list[Sample]:
    """Samples of a closed loop that keeps the batch full."""
    return _run(url, LoadPlan((Load(clients=clients),), LENGTHS, None, seconds, clients, 0))


def overload(url: str, rate: float, seconds: float) -> list[Sample]:
    """Samples of Poisson arrivals."""
    arrivals = open_arrivals(rate, True, LENGTHS, 1, None, seconds)
    load = Load(rate=rate, arrivals=tuple(arrivals))
    return _run(url, LoadPlan((load,), LENGTHS, None, seconds, 4, 1))


def _run(url: str, plan: LoadPlan) -> list[Sample]:
    target = Target(url, "chat", first_model(url, ""), "", TIMEOUT_S, True)
    (samples,) = asyncio.run(run_plan(target, plan))
    return samples


def most_held(samples: Sequence[Sample]) -> int:
    """Most requests at once that were answered in the end: the batch and the queue."""
    events = [(x.sent_s, 1) for x in samples if x.ok] + [(x.ended_s, -1) for x in samples if x.ok]
    held = most = 0
    for _, change in sorted(events):
        held += change
        most = max(most, held)
    return most


def steady_goodput(samples: Sequence[Sample], objectives: Objectives, seconds: float) -> float:
    """Good tokens a second between a quarter of the load and its end: no ramp, no tail."""
    began_s = min(x.due_s for x in samples)
    first_s, last_s = began_s + seconds / 4, began_s + seconds
    good = [
        x.output_tokens
        for x in samples
        if x.meets(objectives.ttft_ms, objectives.tpot_ms) and first_s <= x.ended_s < last_s
    ]
    return round(sum(good) / (last_s - first_s), 2)


def retry_ratios(samples: Sequence[Sample]) -> list[float]:
    """Retry-After of each refusal over the wait of the answered requests around it."""
    ratios = []
    for refused in samples:
        near = [x.ttft_s for x in samples if x.ok and abs(x.due_s - refused.due_s) <= NEAR_S]
        if refused.retry_after_s is not None and near:
            ratios.append(refused.retry_after_s / statistics.median(near))
    return ratios


def run(
    model_dir: Path,
    port: int,
    seconds: float,
    factor: float,
    batch: int,
    objectives: Objectives,
    rank_threads: int,
) -> tuple[list[dict[str, Any]], QuietMonitor]:
    """Two rows, at capacity and at `factor` times it, and the less quiet of both monitors."""
    batch_setting = f"engine.max_sequences={batch}"
    threads = f"engine.threads={rank_threads}"
    with live_service(model_dir, port, batch_setting, threads) as found, quiet_monitor() as first:
        samples = capacity(f"http://127.0.0.1:{found}", batch, seconds)
    at_capacity = summarise(samples, objectives, batch, None)
    at_capacity["steady_goodput"] = steady_goodput(samples, objectives, seconds)
    rate = sum(x.ok for x in samples) / at_capacity["seconds"]
    queue = max(1, round(rate * objectives.ttft_ms / 1e3 / 2))
    settings = (batch_setting, threads, f"serving.max_queued_requests={queue}")
    with live_service(model_dir, port, *settings) as found, quiet_monitor() as second:
        samples = overload(f"http://127.0.0.1:{found}", factor * rate, seconds)
    row = summarise(samples, objectives, None, round(factor * rate, 3))
    row["steady_goodput"] = steady_goodput(samples, objectives, seconds)
    ratios = retry_ratios(samples)
    honest = sum(0.5 <= ratio <= 2.0 for ratio in ratios) / len(ratios) if ratios else None
    at_most = max(at_capacity["steady_goodput"], 1e-9)
    row |= {
        "batch": batch,
        "queue_limit": queue,
        "most_held": most_held(samples),
        "goodput_over_capacity": round(row["steady_goodput"] / at_most, 3),
        "retry_ratio_p5": percentile(ratios, 5),
        "retry_ratio_p50": percentile(ratios, 50),
        "retry_ratio_p95": percentile(ratios, 95),
        "retry_honest_share": None if honest is None else round(honest, 3),
    }
    rows = [{"load": "capacity", **at_capacity}, {"load": f"{factor:g} x capacity", **row}]
    return rows, max(first, second, key=lambda monitor: monitor.other_cores)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=8, help="engine.max_sequences")
    parser.add_argument("--rank-threads", type=int, default=1)
    parser.add_argument("--ttft-ms", type=float, default=6000.0)
    parser.add_argument("--tpot-ms", type=float, default=200.0)
    options = parser.parse_args()
    objectives = Objectives(options.ttft_ms, options.tpot_ms)
    model_dir = Path(options.model).resolve()
    rows, monitor = run(
        model_dir,
        options.port,
        options.seconds,
        options.factor,
        options.batch,
        objectives,
        options.rank_threads,
    )
    emit("overload", rows, monitor, options.json)


if __name__ == "__main__":
    main()
