"""`coterie replay`: a recorded routing trace through every eviction policy, and the optimum."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from app.plain_console import plain_console
from core.errors import SettingsError


def replay(
    trace: Annotated[Path, typer.Argument(help="Routing trace: .npz, or a route-trace .csv.")],
    capacity: Annotated[
        str, typer.Option("--capacity", metavar="N,N", help="Experts that fit, a layer.")
    ] = "12,16,24,32",
    policies: Annotated[
        str, typer.Option("--policies", metavar="NAME,NAME", help="Or all: lru,lfu,affinity,belady")
    ] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="A list with one object a row.")] = False,
) -> None:
    """Replay recorded routing through eviction policies, next to Belady's optimum.

    One row of the trace is one step; the cache is kept over documents. Policies see only the past.
    lru and belady are replayed per layer and in one pool of the same size for all layers.
    "/ belady": misses over the optimum's; "us p99": how long a decision takes, in microseconds.

    \b
      coterie replay trace.npz --capacity 16,32
      coterie replay trace.npz --policies lru,affinity,belady --json
    """
    from expert_pool.replay import POLICIES
    from expert_pool.replay import replay as run
    from expert_pool.routing_trace import RoutingTrace

    names = list(POLICIES) if policies == "all" else _split(policies)
    results = list(run(RoutingTrace.read(trace), names, _capacities(capacity)))
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    table = Table("policy", "scope", box=None, pad_edge=False)
    for heading in ("capacity", "hit rate", "misses", "/ belady", "us p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        p99 = result.decision_us_p99
        table.add_row(
            result.policy + (" (default)" if result.default else ""),
            result.scope,
            str(result.capacity),
            f"{result.hit_rate:.4f}",
            str(result.misses),
            f"{result.misses_over_belady:.3f}",
            "" if p99 is None else f"{p99:.1f}",
            style="bold" if result.default else None,
        )
    plain_console().print(table)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _capacities(text: str) -> list[int]:
    try:
        capacities = [int(part) for part in _split(text)]
    except ValueError:
        capacities = []
    if not capacities or min(capacities) < 1:
        raise SettingsError(f"--capacity takes whole numbers such as 12,16,24,32, found {text!r}")
    return capacities
