"""Eviction policies on recorded routing: the tables of docs/policies.md.

    COTERIE_DATA=FOLDER python -m benchmarks.replay_tables [--json] [--trace NAME] [--rules] ...

Replays every trace under $COTERIE_DATA/routing through every policy. The peer of each figure is in
the same run: LRU and LFU (count decayed by .95 a token of the layer) as baselines, Belady's
optimum of the same scope and capacity as the bound. The gap closed is
(misses of LFU - misses of the policy) / (misses of LFU - misses of Belady), per layer.
`--rules` adds what hysteresis and moving quotas do to the default: a pool's decisions, no bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from app.measurement import machine, quiet_monitor, versions
from core.errors import CoterieError, SettingsError
from expert_pool.eviction_rules import EvictionRules
from expert_pool.oracle import ABSENT
from expert_pool.policies import make_policy
from expert_pool.replay import POLICIES, ReplayResult, replay
from expert_pool.routing_trace import RoutingTrace
from expert_pool.settings import PoolSettings
from expert_pool.simulated_pool import SimulatedPool

CAPACITIES = (12, 16, 24, 32)
BASELINE, OWN, OPTIMUM = "lfu", "affinity", "belady"


def trace_files(names: Iterable[str] | None) -> list[Path]:
    data = os.environ.get("COTERIE_DATA")
    if not data:
        raise SettingsError("set COTERIE_DATA to the folder whose routing/ holds the traces")
    routing = Path(data) / "routing"
    if names:
        return [routing / name for name in names]
    return sorted([*routing.glob("*.npz"), *routing.glob("*.route.csv")])


def gap_closed(results: list[ReplayResult], policy: str, capacity: int) -> float:
    """Share of the way from LFU's misses to the optimum's, per layer."""
    misses = {
        result.policy: result.misses
        for result in results
        if result.capacity == capacity and result.scope == "per_layer"
    }
    return (misses[BASELINE] - misses[policy]) / (misses[BASELINE] - misses[OPTIMUM])


def measure(path: Path) -> dict[str, Any]:
    trace = RoutingTrace.read(path)
    steps, layers, _ = trace.demands.shape
    results = list(replay(trace, POLICIES, CAPACITIES))
    return {
        "trace": path.name,
        "steps": steps,
        "layers": layers,
        "experts": trace.num_experts,
        "widest_step": trace.widest,
        "gap_closed": {
            policy: [round(gap_closed(results, policy, c), 3) for c in CAPACITIES]
            for policy in ("lru", OWN)
        },
        "rows": [asdict(result) for result in results],
    }


RULES = {"neither": (0.0, False), "hysteresis": (None, False), "both": (None, True)}
"""Hysteresis (None: as served) and whether quotas move, by the name of a row."""


def rules_rows(trace: RoutingTrace) -> list[dict[str, Any]]:
    """The default policy with and without the rules around it; layers have equal slots at first.

    `returns` are experts read again within two steps of their eviction.
    """
    served = PoolSettings()
    layers, experts = trace.demands.shape[1], trace.num_experts
    rows = []
    for name, (hysteresis, move) in RULES.items():
        for capacity in CAPACITIES:
            policy = make_policy(served.policy, layers, experts)
            spared = served.hysteresis if hysteresis is None else hysteresis
            rules = EvictionRules(policy, layers, experts, spared)
            pool = SimulatedPool(
                [experts] * layers, [trace.widest] * layers, [capacity] * layers, rules, move
            )
            moves = sum(len(step) for step in _steps(pool, trace))
            rows.append(
                {
                    "rules": name,
                    "capacity": capacity,
                    "hit_rate": 1.0 - pool.misses / trace.accesses,
                    "misses": pool.misses,
                    "returns": rules.returns,
                    "moved_slots": moves,
                    "quotas": [min(pool.quotas), max(pool.quotas)],
                }
            )
    return rows


def _steps(pool: SimulatedPool, trace: RoutingTrace) -> Iterable[list[Any]]:
    for step in range(trace.demands.shape[0]):
        for layer, demand in enumerate(trace.demands[step]):
            asked = demand[demand != ABSENT]
            if asked.size:
                weights = trace.weights
                given = None if weights is None else weights[step, layer][: asked.size]
                pool.demand(layer, asked, np.ones_like(asked), 1, given)
        yield pool.end_step()


def rules_table(rows: list[dict[str, Any]]) -> str:
    head = " | ".join(f"C={capacity}" for capacity in CAPACITIES)
    lines = [
        f"| misses (returns; moved slots; quotas) | {head} |",
        "|---|" + "---|" * len(CAPACITIES),
    ]
    for name in RULES:
        cells = [
            f"{row['misses']:,} ({row['returns']:,}; {row['moved_slots']}; "
            f"{row['quotas'][0]}-{row['quotas'][1]})"
            for row in rows
            if row["rules"] == name
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown(measured: dict[str, Any]) -> str:
    """One trace as a table: hit rate, and misses over the optimum's of the same scope."""
    head = " | ".join(f"C={capacity}" for capacity in CAPACITIES)
    lines = [
        f"### {measured['trace']}",
        f"{measured['steps']} steps, {measured['layers']} layers of {measured['experts']} experts, "
        f"{measured['widest_step']} a token",
        "",
        f"| hit rate (misses / Belady) | {head} | decision p99, us |",
        "|---|" + "---|" * (len(CAPACITIES) + 1),
    ]
    cells: dict[tuple[str, str], list[str]] = {}
    slowest: dict[tuple[str, str], float] = {}
    for row in measured["rows"]:
        key = row["policy"], row["scope"]
        ratio = "" if row["policy"] == OPTIMUM else f" ({row['misses_over_belady']:.2f})"
        cells.setdefault(key, []).append(f"{row['hit_rate']:.3f}{ratio}")
        slowest[key] = max(slowest.get(key, 0.0), row["decision_us_p99"] or 0.0)
    for (policy, scope), row in cells.items():
        name = policy if scope == "per_layer" else f"{policy}, one pool for all layers"
        p99 = f"{slowest[policy, scope]:.0f}" if policy != OPTIMUM else ""
        lines.append(f"| {name} | {' | '.join(row)} | {p99} |")
    for policy, closed in measured["gap_closed"].items():
        shares = " | ".join(f"{share:.3f}" for share in closed)
        lines.append(f"| gap closed by {policy} | {shares} | |")
    return "\n".join(lines) + "\n"


def summary(measured: list[dict[str, Any]]) -> dict[str, float]:
    closed = [share for one in measured for share in one["gap_closed"][OWN]]
    behind = []
    for one in measured:
        rates = {(r["policy"], r["capacity"], r["scope"]): r["hit_rate"] for r in one["rows"]}
        for capacity in CAPACITIES:
            own, lru = ((name, capacity, "per_layer") for name in (OWN, "lru"))
            behind.append(rates[lru] - rates[own])
    return {
        "gap_closed_mean": round(sum(closed) / len(closed), 3),
        "gap_closed_least": round(min(closed), 3),
        "most_behind_lru": round(max(behind), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object, no tables")
    parser.add_argument("--rules", action="store_true", help="hysteresis and quotas too: slow")
    parser.add_argument("--trace", action="append", help="file name under routing/; all if absent")
    arguments = parser.parse_args()
    measured = []
    try:
        with quiet_monitor() as monitor:
            for path in trace_files(arguments.trace):
                measured.append(measure(path))
                if not arguments.json:
                    print(markdown(measured[-1]), flush=True)
                if arguments.rules:
                    measured[-1]["rules"] = rules_rows(RoutingTrace.read(path))
                    if not arguments.json:
                        print(rules_table(measured[-1]["rules"]), flush=True)
    except CoterieError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not measured:
        print("error: no traces under $COTERIE_DATA/routing", file=sys.stderr)
        return 1
    figures = summary(measured)
    if arguments.json:
        report = {"traces": measured, "summary": figures, "machine": machine()}
        print(json.dumps({**report, "versions": versions(), **monitor.report()}, indent=2))
    else:
        print(json.dumps({**figures, **monitor.report()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
