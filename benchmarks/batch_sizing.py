"""Batch sizes chosen before each step against fixed ones: what a token reads, and who waits.

    COTERIE_DATA=FOLDER python -m benchmarks.batch_sizing [--json] [--requests 600] [--loads 0.3]

Rows by policy and load. "fixed N": at most N sequences, a step whenever anything is ready.
"dynamic" and "frugal" are the modes of `engine.batching`; only frugal also puts steps and prompts
off, spending what the objectives leave. A load is a share of the requests a second that the
largest fixed size completes when all come at once, in the same simulation
(benchmarks/batch_simulator.py: the real batcher, sizer and model of step times, which learns from
the simulated steps; the machine's numbers are in the row "machine"). Routing and arrivals are
recorded ones under $COTERIE_DATA (routing/*.npz; traces/azure2023_conv.csv, stretched to the load);
without it both are drawn from a seed.

`effective_activation_ratio`: bytes of the distinct experts of all steps / (tokens x bytes of all
experts), prompt tokens included. Attainment: share of requests whose time to first token, and mean
time of the tokens after it, keep the objectives. `saving` compares with the best fixed size that
attains the same. "independence" rows: the ratio if each token drew its experts evenly and alone.
`demo model` rows are the real engine on this machine and its own clock, for a few seconds each.
"""

from __future__ import annotations

import os

from core.torch_environment import unset_variables

os.environ.update(unset_variables())  # read once, when torch is loaded

import argparse
import csv
import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from app.measurement import emit, quiet_monitor
from benchmarks.batch_live import live_rows
from benchmarks.batch_simulator import (
    CONTEXT_TOKENS,
    Arrival,
    Machine,
    Outcome,
    Routes,
    Simulation,
)
from core.objectives import ObjectiveSettings
from engine.batch_size import Batching
from engine.step_forecast import SizeBounds
from expert_pool.routing_trace import RoutingTrace

SIZES = (1, 8, 16, 32, 64)
STEP_TOKENS = 512
_SAME = 0.01
"""Attainments that differ by less are the same."""


def drawn_trace(tokens: int = 2000, layers: int = 26, experts: int = 64, top_k: int = 6) -> Any:
    """A seeded trace: experts differ in popularity, and documents favour some of them."""
    draw = np.random.default_rng(0)
    popular = draw.standard_normal((layers, experts))
    documents = 20
    taste = np.repeat(draw.standard_normal((documents, layers, experts)), tokens // documents, 0)
    scores = 0.7 * popular + taste + 1.5 * draw.gumbel(size=taste.shape)
    ids = np.argsort(-scores, axis=2)[:, :, :top_k]
    offsets = np.arange(0, taste.shape[0], tokens // documents)
    return RoutingTrace.of("drawn from a seed", ids, experts, offsets)


def drawn_arrivals(count: int) -> list[Arrival]:
    """Poisson arrivals, one a second; lengths that vary as those of chats do."""
    draw = np.random.default_rng(1)
    at_s = np.cumsum(draw.exponential(1.0, count))
    prompts = draw.lognormal(6.2, 1.0, count).clip(8, 3000).astype(int)
    answers = draw.lognormal(4.8, 0.8, count).clip(2, 800).astype(int)
    return [
        Arrival(float(t), int(p), int(a)) for t, p, a in zip(at_s, prompts, answers, strict=True)
    ]


def recorded_arrivals(path: Path, count: int) -> list[Arrival]:
    """The first ones of a trace, shortened to the context."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    found = []
    for row in rows:
        answer = min(max(2, int(row["output_tokens"])), CONTEXT_TOKENS // 4)
        prompt = min(max(1, int(row["prompt_tokens"])), CONTEXT_TOKENS - answer)
        found.append(Arrival(float(row["arrival_s"]), prompt, answer))
    return found


def at_rate(arrivals: Seq[Arrival], per_s: float) -> list[Arrival]:
    """The same requests in the same order, stretched in time."""
    last_s = arrivals[-1].at_s
    stretch = len(arrivals) / per_s / last_s if per_s else 0.0
    return [Arrival(a.at_s * stretch, a.prompt_tokens, a.output_tokens) for a in arrivals]


class Scene:
    """What all policies meet alike."""

    def __init__(
        self,
        trace: RoutingTrace,
        arrivals: list[Arrival],
        machine: Machine,
        objectives: ObjectiveSettings,
        largest: int = SIZES[-1],
    ) -> None:
        self.machine = machine
        self.objectives = objectives
        self.largest = largest
        self._arrivals = arrivals
        self._routes = Routes(trace, machine.resident_share)
        at_once = self._run("fixed", largest, at_rate(arrivals, 0.0))
        self.capacity_per_s = at_once.done / at_once.ended_s

    def row(self, policy: str, load: float) -> dict[str, Any]:
        """One policy at one load: "fixed 8", "dynamic", "frugal"."""
        name, _, size = policy.partition(" ")
        batching: Batching = name  # type: ignore[assignment]
        arrivals = at_rate(self._arrivals, load * self.capacity_per_s)
        outcome = self._run(batching, int(size or self.largest), arrivals)
        return {"policy": policy, "load": load, **self._figures(outcome)}

    def _run(self, batching: Batching, size: int, arrivals: list[Arrival]) -> Outcome:
        bounds = SizeBounds(1, size, STEP_TOKENS)
        simulation = Simulation(self.machine, self._routes, self.objectives, batching, bounds)
        return simulation.run(arrivals)

    def _figures(self, outcome: Outcome) -> dict[str, Any]:
        a_token = outcome.distinct / max(1, outcome.tokens)
        return {
            "effective_activation_ratio": round(a_token / self._routes.experts, 5),
            "distinct_per_step": round(outcome.distinct / max(1, outcome.steps), 1),
            "bytes_per_token": round(a_token * self.machine.expert_bytes),
            "ttft_attainment": round(outcome.first_in_time / max(1, outcome.first_all), 4),
            "tpot_attainment": round(outcome.rest_in_time / max(1, outcome.rest_all), 4),
            "both_attainment": round(outcome.both_in_time / max(1, outcome.first_all), 4),
            "requests_done": outcome.done,
            "steps": outcome.steps,
            "held_share": round(outcome.held_s / outcome.ended_s, 3),
            "model_error": round(outcome.model_error, 3),
        }


def saving(rows: Seq[dict[str, Any]], policy: str, load: float) -> dict[str, Any]:
    """How much lower a policy's ratio is than that of the best fixed size which attains as much."""
    at_load = [row for row in rows if row.get("load") == load]
    own = next(row for row in at_load if row["policy"] == policy)
    peers = [
        row
        for row in at_load
        if row["policy"].startswith("fixed")
        and all(row[name] >= own[name] - _SAME for name in ("ttft_attainment", "tpot_attainment"))
    ]
    best = min(peers, key=lambda row: row["effective_activation_ratio"], default=None)
    row = {"policy": policy, "load": load, "best_fixed": best and best["policy"], "saving": None}
    if best is not None:
        own_ratio = own["effective_activation_ratio"]
        row["saving"] = round(1 - own_ratio / best["effective_activation_ratio"], 3)
    return row


def independence(experts: int = 128, top_k: int = 2) -> list[dict[str, Any]]:
    """Expected ratio of a layer if n tokens draw top_k of its experts evenly and independently."""
    return [
        {
            "policy": "independence",
            "experts": experts,
            "top_k": top_k,
            "sequences": n,
            "effective_activation_ratio": round((1 - (1 - top_k / experts) ** n) / n, 5),
        }
        for n in (1, 8, 16, 32, 64)
    ]


def open_scene(
    data: Path | None, requests: int, machine: Machine, objectives: ObjectiveSettings
) -> tuple[Scene, dict[str, Any]]:
    """Recorded routing and arrivals where there are any, and a row that says what was taken."""
    routing = sorted((data / "routing").glob("*.npz")) if data else []
    trace = RoutingTrace.read(routing[0]) if routing else drawn_trace()
    path = data / "traces" / "azure2023_conv.csv" if data else None
    if path is not None and path.is_file():
        arrivals, source = recorded_arrivals(path, requests), path.name
    else:
        arrivals, source = drawn_arrivals(requests), "drawn from a seed"
    scene = Scene(trace, arrivals, machine, objectives)
    return scene, {
        "what": "machine",
        **asdict(machine),
        **objectives.model_dump(),
        "routing": Path(trace.name).name,
        "arrivals": source,
        "requests": requests,
        "step_tokens": STEP_TOKENS,
        "capacity_requests_s": round(scene.capacity_per_s, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, no table")
    parser.add_argument("--requests", type=int, default=600, help="of the arrival trace")
    parser.add_argument("--loads", default="0.3,0.6,0.9", help="shares of the capacity")
    parser.add_argument("--resident", type=float, default=1.0, help="share of experts with a slot")
    parser.add_argument(
        "--live-requests", type=int, default=100, help="to the demo model, a policy; 0: none"
    )
    served = ObjectiveSettings()
    parser.add_argument("--ttft-ms", type=float, default=served.ttft_ms, help="objective")
    parser.add_argument("--tpot-ms", type=float, default=served.tpot_ms, help="objective")
    arguments = parser.parse_args()
    data = os.environ.get("COTERIE_DATA")
    loads = [float(load) for load in arguments.loads.split(",")]
    with quiet_monitor() as monitor:
        machine = Machine(resident_share=arguments.resident)
        objectives = ObjectiveSettings(ttft_ms=arguments.ttft_ms, tpot_ms=arguments.tpot_ms)
        folder = Path(data) if data else None
        scene, about = open_scene(folder, arguments.requests, machine, objectives)
        rows: list[dict[str, Any]] = [about]
        policies = [*(f"fixed {size}" for size in SIZES), "dynamic", "frugal"]
        for load in loads:
            for policy in policies:
                rows.append(scene.row(policy, load))
                print(rows[-1], file=sys.stderr, flush=True)
            rows += [saving(rows, policy, load) for policy in ("dynamic", "frugal")]
            print(rows[-1], file=sys.stderr, flush=True)
        rows += independence()
        if arguments.live_requests:
            rows += live_rows(arguments.live_requests)
    emit("batch_sizing", rows, monitor, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
