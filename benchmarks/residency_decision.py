"""What deciding about experts costs, by itself: one layer of one step.

    python -m benchmarks.residency_decision [--json] [--experts 128] [--top-k 8] [--model FOLDER]

`decision` rows: `touch` with what a layer is asked for, then `victims` for what is missing, on a
seeded trace of topics, at a quarter of the experts; each policy beside the default with its
hysteresis. `all resident` rows: what the pool adds to a layer's call when every expert of a model
is there (counting, pinning, looking up slots), and what routing adds before it. Times are CPU time
of the thread and wall time; the wall clock also counts what else the machine does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.measurement import emit, quiet_monitor
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.eviction_rules import EvictionRules
from expert_pool.experts_forward import _make_group
from expert_pool.policies import POLICIES, Policy, make_policy
from expert_pool.pool import ExpertPool
from expert_pool.routing import sort_by_expert
from expert_pool.settings import PoolSettings
from expert_pool.tables import IntArray

LAYERS = 8
STEPS = 1500
DEMO_MODEL = Path(__file__).parents[1] / "demo_model"


def percentiles(name: str, cpu_ns: list[int], wall_ns: list[int]) -> dict[str, Any]:
    row: dict[str, Any] = {"what": name, "calls": len(cpu_ns)}
    for clock, spent in (("cpu", cpu_ns), ("wall", wall_ns)):
        for share in (50, 99):
            row[f"{clock}_us_p{share}"] = round(float(np.percentile(spent, share)) / 1e3, 1)
    return row


def topics(experts: int, top_k: int) -> IntArray:
    """[STEPS, LAYERS, top_k]: each document favours some experts, and some are always popular."""
    draw = np.random.default_rng(0)
    popular = draw.standard_normal((LAYERS, experts))
    taste = np.repeat(draw.standard_normal((STEPS // 100, LAYERS, experts)), 100, axis=0)
    scores = 0.7 * popular + taste + draw.gumbel(size=taste.shape)
    return np.sort(np.argsort(-scores, axis=2)[:, :, :top_k], axis=2)


def decision(name: str, policy: Policy, experts: int, top_k: int) -> dict[str, Any]:
    demands = topics(experts, top_k)
    resident = np.zeros((LAYERS, experts), dtype=np.bool_)
    cpu_ns, wall_ns = [], []
    for step in range(STEPS):
        for layer in range(LAYERS):
            asked = demands[step, layer]
            counts = np.ones_like(asked)
            here = resident[layer]
            missing = asked.size - int(here[asked].sum())
            excess = int(here.sum()) + missing - experts // 4
            others = here.copy()
            others[asked] = False
            candidates = np.flatnonzero(others)
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            policy.touch(layer, asked, counts, 1)
            leave = policy.victims(layer, candidates, excess) if missing else candidates[:0]
            wall_ns.append(time.perf_counter_ns() - wall)
            cpu_ns.append(time.thread_time_ns() - cpu)
            here[asked] = True
            here[leave] = False
    return percentiles(f"decision, {name}", cpu_ns, wall_ns)


def all_resident(model: Path, tokens: int) -> list[dict[str, Any]]:
    """Everything has a slot and is there."""
    index = CheckpointIndex.open(model)
    pool = ExpertPool(index, PoolSettings())
    layers = index.layers
    pool.preload([(layer.ordinal, e) for layer in layers for e in range(layer.num_experts)])
    pool.settle()
    draw = torch.Generator().manual_seed(0)
    device = torch.device("cpu")
    spent: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in ("routing", "pool")}
    for _ in range(STEPS):
        pool.begin_step()
        for layer in layers:
            experts, top_k = layer.num_experts, layer.top_k
            weights, chosen = torch.rand(tokens, experts, generator=draw).topk(top_k)
            clocks = _clocks()
            routing = sort_by_expert(chosen, weights, experts)
            _note(spent["routing"], clocks)
            clocks = _clocks()
            groups = iter(pool.demand(layer.ordinal, routing.counts, tokens, weights=_nothing))
            _make_group(pool, layer.ordinal, routing, next(groups), device)
            groups.close()
            _note(spent["pool"], clocks)
        pool.end_step()
    pool.close()
    return [
        percentiles(f"all resident, {tokens} tokens, {name}", cpu, wall)
        for name, (cpu, wall) in spent.items()
    ]


def _nothing() -> Any:
    raise AssertionError("nothing is decided where everything has a slot")


def _clocks() -> tuple[int, int]:
    return time.thread_time_ns(), time.perf_counter_ns()


def _note(spent: tuple[list[int], list[int]], since: tuple[int, int]) -> None:
    now = _clocks()
    for times, then, stop in zip(spent, since, now, strict=True):
        times.append(stop - then)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object, no table")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    arguments = parser.parse_args()
    experts, top_k = arguments.experts, arguments.top_k
    makers: dict[str, Callable[[], Policy]] = {
        name: lambda name=name: make_policy(name, LAYERS, experts)  # type: ignore[misc]
        for name in POLICIES
    }
    served = PoolSettings()
    makers["as served"] = lambda: EvictionRules(
        make_policy(served.policy, LAYERS, experts), LAYERS, experts, served.hysteresis
    )
    with quiet_monitor() as monitor:
        rows = [decision(name, make(), experts, top_k) for name, make in makers.items()]
        for tokens in (1, 16):
            rows += all_resident(arguments.model, tokens)
    emit("residency_decision", rows, monitor, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
