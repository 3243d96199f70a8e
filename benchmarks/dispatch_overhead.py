"""What choosing a replica by its experts costs: `python -m benchmarks.dispatch_overhead --json`.

`choose` is timed alone, for 2 to 64 replicas that all report nine domains. Then two services with
two replicas each and an engine that answers at once take turns, block by block in one run: one
with Serve's own router (the shorter queue of two), one with the expert router. `added_p50_ms` is
the median over the pairs of blocks of the difference of their medians. A last row is what one
more call of a replica takes, were the hint of a request sent apart from the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from app.measurement import emit, quiet_monitor
from benchmarks.gateway import Connection
from benchmarks.instant_engine import InstantEngine
from core.step import RoutingSummary, StepResult, StepStats
from deployments.dispatch_settings import DispatchSettings
from deployments.dispatcher import BY_COST, Ask, Dispatcher
from deployments.last_replicas import prefix_hashes
from deployments.replica_report import ReplicaReport, domain_hash

REPLICAS = (2, 4, 16, 64)
CHOICES = 2000
MODEL = "instant"
MAX_SEQUENCES = 64
DOMAINS = tuple(f"domain {number}" for number in range(9))
BLOCK_REQUESTS = 100
WARM_UP_REQUESTS = 60
ROUTERS = ("least_loaded", "experts")


class ReportingEngine(InstantEngine):
    """As the instant engine, with steps that are measured and a pool that reports."""

    def step(self) -> StepResult:
        """One token each."""
        began = time.perf_counter()
        sequences = len(self._live)
        result = super().step()
        result.stats.step_s = time.perf_counter() - began
        result.stats.decode_tokens = sequences
        result.stats.prefill_tokens = 1 + self._steps % 3
        return result

    def gauges(self) -> StepStats:
        """With what nine domains would find."""
        stats = super().gauges()
        rates = {name: 0.5 + 0.01 * number for number, name in enumerate(DOMAINS)}
        stats.routing = RoutingSummary(hit_rate=0.5, hit_rate_by_domain=rates, miss_s=1e-6)
        return stats


def open_engine(settings: dict[str, Any]) -> ReportingEngine:
    """The engine factory for a rank."""
    return ReportingEngine(int(settings["engine"].get("max_sequences", 64)))


def choosing() -> list[dict[str, Any]]:
    """Rows of `Dispatcher.choose` alone."""
    rows = []
    for count in REPLICAS:
        dispatcher = Dispatcher(DispatchSettings(), time.monotonic)
        names = [f"replica {number}" for number in range(count)]
        for number, name in enumerate(names):
            dispatcher.report(name, _report(number))
        asks = [
            Ask(
                prompt_tokens=1000,
                domain=DOMAINS[number % len(DOMAINS)],
                session=f"session {number % 50}",
                prefix=prefix_hashes(range(number % 50, 1000), "tenant"),
            )
            for number in range(200)
        ]
        times_us = []
        for number in range(CHOICES):
            ask = asks[number % len(asks)]
            began = time.perf_counter()
            choice = dispatcher.choose(ask, names)
            ticket = dispatcher.sent(choice.replicas[0], ask)
            times_us.append((time.perf_counter() - began) * 1e6)
            dispatcher.ended(ticket)
            if choice.reason != BY_COST:
                raise RuntimeError(f"expected a choice by cost, found {choice.reason}")
        times_us.sort()
        rows.append(
            {
                "replicas": count,
                "choose_p50_us": round(statistics.median(times_us), 1),
                "choose_p99_us": round(times_us[int(CHOICES * 0.99)], 1),
            }
        )
    return rows


def _report(number: int) -> ReplicaReport:
    return ReplicaReport(
        served_tokens=100_000,
        running=number % 5,
        prompt_tokens=100 * (number % 3),
        kv_free_tokens=50_000,
        kv_tokens=100_000,
        max_sequences=16,
        step_s=0.02,
        sequence_s=0.001,
        prefill_token_s=0.0005,
        cold_token_s=0.05,
        hit_rate=0.6,
        answer_tokens=150,
        domains={
            domain_hash(name): 0.4 + 0.06 * ((number + at) % 9) for at, name in enumerate(DOMAINS)
        },
    )


async def taking_turns(port: int, blocks: int) -> list[dict[str, Any]]:
    """Rows of the two services, one request at a time."""
    connections = {name: await Connection(port, f"/{name}").open() for name in ROUTERS}
    for connection in connections.values():
        for _ in range(WARM_UP_REQUESTS):
            await connection.stream(4)
    await asyncio.sleep(2.0)  # reports of what the steps cost have come
    times_ms: dict[str, list[float]] = {name: [] for name in ROUTERS}
    medians: dict[str, list[float]] = {name: [] for name in ROUTERS}
    for block in range(blocks):
        order = ROUTERS if block % 2 else ROUTERS[::-1]
        for name in order:
            found = [await connections[name].stream(4) * 1e3 for _ in range(BLOCK_REQUESTS)]
            times_ms[name] += found
            medians[name].append(statistics.median(found))
        print(f"block {block + 1} of {blocks}", file=sys.stderr)
    added = [b - a for a, b in zip(medians[ROUTERS[0]], medians[ROUTERS[1]], strict=True)]
    rows: list[dict[str, Any]] = [
        {
            "router": name,
            "ttft_p50_ms": round(statistics.median(times_ms[name]), 2),
            "ttft_p99_ms": round(sorted(times_ms[name])[int(len(times_ms[name]) * 0.99)], 2),
        }
        for name in ROUTERS
    ]
    rows.append({"added_p50_ms": round(statistics.median(added), 2), "blocks": blocks})
    return rows


async def another_call() -> dict[str, Any]:
    """The row of one more call of a replica."""
    from deployments.running_application import driver_handle
    from deployments.supervisor_client import SupervisorClient

    client = SupervisorClient(driver_handle("Supervisor", "experts"))
    times_ms = []
    for _ in range(BLOCK_REQUESTS):
        began = time.perf_counter()
        await client.info(30.0)
        times_ms.append((time.perf_counter() - began) * 1e3)
    return {"another_call_p50_ms": round(statistics.median(times_ms), 2)}


def live(model_dir: Path, port: int, blocks: int) -> tuple[list[dict[str, Any]], Any]:
    """Deploy both on a Ray of our own and measure."""
    from app.local_ray import local_ray, prepare_environment

    prepare_environment(1 << 20)
    import httpx
    from ray import serve

    from deployments.application import application
    from deployments.settings import ServingSettings

    serving = ServingSettings(port=port, replicas=2)
    engine = {"max_sequences": MAX_SEQUENCES}
    factory = "benchmarks.dispatch_overhead:open_engine"
    with local_ray(num_cpus=8):
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        for name in ROUTERS:
            dispatch = DispatchSettings.model_validate({"policy": name})
            built = application(MODEL, model_dir, serving, engine, {}, factory, dispatch=dispatch)
            serve.run(built, name=name, route_prefix=f"/{name}")
        with quiet_monitor() as monitor:
            rows = asyncio.run(taking_turns(port, blocks))
            rows.append(asyncio.run(another_call()))
        page = httpx.get(f"http://127.0.0.1:{port}/experts/metrics", timeout=30).text
        chosen = [line for line in page.splitlines() if 'reason="cost"' in line]
        rows.append({"chosen_by_cost": int(float(chosen[0].split()[-1])) if chosen else 0})
        serve.shutdown()
    return rows, monitor


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default="demo_model", help="folder of a tokenizer and template")
    parser.add_argument("--port", type=int, default=18324)
    parser.add_argument("--blocks", type=int, default=10, help="turns of each service")
    parser.add_argument("--plain", action="store_true", help="only `choose` alone")
    options = parser.parse_args()
    with quiet_monitor() as monitor:
        rows = choosing()
    if not options.plain:
        print(json.dumps(rows), file=sys.stderr)
        more, monitor = live(Path(options.model).resolve(), options.port, options.blocks)
        rows += more
    emit("dispatch_overhead", rows, monitor, options.json)


if __name__ == "__main__":
    main()
