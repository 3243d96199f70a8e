"""What deciding about experts costs, by itself: one layer of one step.

    python -m benchmarks.residency_decision [--json] [--experts 128] [--top-k 8] [--model FOLDER]

`decision` rows: `touch` with what a layer is asked for, then `victims` for what is missing, on a
seeded trace of topics, at a quarter of the experts; each policy beside the default with its
hysteresis. `all resident` rows: what the pool adds to a layer's call when every expert of a model
is there (counting, pinning, looking up slots), what routing adds before it, and what begins and
ends a step. Where every sequence has a domain and a session ("labelled"), one decode step of eight
learns from that, which is the p99. `share of a step` puts the plain rows beside a decode step of
one sequence of the same model. Reading ahead, which runs only where experts are missing, is timed
by `hidden_s` and `decide_s` of its own statistics, not here. Times are CPU time of the thread and
wall time; the wall clock also counts what else the machine does.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.measurement import emit, quiet_monitor
from core.request import Request, SamplingParams
from core.step import SequencePart
from engine.engine import Engine
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.eviction_rules import EvictionRules
from expert_pool.experts_forward import _make_group
from expert_pool.policies import POLICIES, Policy, make_policy
from expert_pool.pool import ExpertPool
from expert_pool.routing import Routing, sort_by_expert
from expert_pool.settings import PoolSettings
from expert_pool.tables import IntArray

LAYERS = 8
STEPS = 1500
DECODE_STEPS = 64
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


def all_resident(model: Path, tokens: int, labelled: bool = False) -> list[dict[str, Any]]:
    """Everything has a slot and is there; `labelled`: each token's sequence has a domain and a
    session."""
    index = CheckpointIndex.open(model)
    pool = ExpertPool(index, PoolSettings())
    layers = index.layers
    pool.preload([(layer.ordinal, e) for layer in layers for e in range(layer.num_experts)])
    pool.settle()
    draw = torch.Generator().manual_seed(0)
    device = torch.device("cpu")
    parts = ("routing", "pool", "begin and end of a step")
    spent: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in parts}
    sequences = tuple(_sequence(at) for at in range(tokens)) if labelled else ()
    for _ in range(STEPS):
        clocks_of_step = _clocks()
        pool.begin_step(sequences)
        begun = _clocks()
        for layer in layers:
            experts, top_k = layer.num_experts, layer.top_k
            weights, chosen = torch.rand(tokens, experts, generator=draw).topk(top_k)
            clocks = _clocks()
            routing = sort_by_expert(chosen, weights, experts)
            _note(spent["routing"], clocks)
            clocks = _clocks()
            asked = pool.demand(
                layer.ordinal,
                routing.counts,
                tokens,
                weights=_nothing,
                rows=functools.partial(_rows_of, routing, top_k),
            )
            groups = iter(asked)
            _make_group(pool, layer.ordinal, routing, next(groups), device)
            groups.close()
            _note(spent["pool"], clocks)
        first, clocks = clocks_of_step, _clocks()
        pool.end_step()
        # As if the step had begun right before its end.
        cpu, wall = (now - (b - a) for now, b, a in zip(clocks, begun, first, strict=True))
        _note(spent[parts[2]], (cpu, wall))
    pool.close()
    kind = f"{tokens} labelled tokens" if labelled else f"{tokens} tokens"
    return [
        percentiles(f"all resident, {kind}, {name}", cpu, wall)
        for name, (cpu, wall) in spent.items()
    ]


def share_of_a_step(model: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The pool's own code of one decode step, as a share of it. Medians of wall times."""
    engine = Engine.open(
        model,
        engine={"max_sequences": 1, "context_tokens": 2 * DECODE_STEPS, "seed": 0},
        pool={"expert_memory": "all"},
    )
    engine.pool.settle()
    params = SamplingParams(max_tokens=DECODE_STEPS, temperature=0.0, ignore_eos=True)
    engine.add(Request(request_id="one", prompt_ids=tuple(range(10, 42)), params=params))
    steps_s = []
    while engine.has_work():
        stats = engine.step().stats
        if stats.decode_tokens:
            steps_s.append(stats.step_s)
    layers = len(engine.pool.index.layers)
    engine.close()
    us = {row["what"]: row for row in rows}

    def own(kind: str) -> float:
        a_call, a_step = (
            us[f"all resident, {kind}, {part}"] for part in ("pool", "begin and end of a step")
        )
        return float(layers * a_call["wall_us_p50"] + a_step["wall_us_p50"])

    own_us = own("1 tokens")
    step_us = float(np.median(steps_s)) * 1e6
    return {
        "what": "all resident, share of a decode step",
        "model": model.name,
        "layers": layers,
        "pool_us_a_step": round(own_us, 1),
        "step_us": round(step_us, 1),
        "share": round(own_us / step_us, 4),
    }


def _sequence(number: int) -> SequencePart:
    return SequencePart(
        sequence_id=number,
        start=1,
        token_ids=(1,),
        block_ids=(0,),
        is_decode=True,
        wants_logits=True,
        domain=f"domain {number % 4}",
        session=f"session {number}",
    )


def _rows_of(routing: Routing, top_k: int) -> IntArray:
    return routing.order // top_k


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
            rows += all_resident(arguments.model, tokens, labelled=True)
        rows.append(share_of_a_step(arguments.model, rows))
    emit("residency_decision", rows, monitor, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
