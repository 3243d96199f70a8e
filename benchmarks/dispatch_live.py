"""Two live replicas of the demo model behind the dispatcher, against Serve's own router.

    COTERIE_DATA=FOLDER python -m benchmarks.dispatch_live [--json] [--rounds 2] [--clients 16]

Both policies in turn, each time on a service of its own with a quarter of the experts resident:
`--clients` ask over HTTP, each its next text as soon as the last is answered, greedily. The texts
are those of `benchmarks.domain_traces`, in an order drawn by the round, nine domains mixed; the
bundled classifier labels them. Rows of `dispatcher` and `least loaded` compare hit rate, bytes
read, and tokens a second after a warm-up; misses are what the live pools counted (/metrics).

`predicted_misses`: each replica's log says which request came when; the simulator's batcher and
pool pass the same requests, whose routing is known from running each text alone, with step times
fitted to the log. `misses` beside it is of the same requests. What the simulator lacks is
off in both: reading ahead, hints, hot start, prefix cache, passes by layer, sizing, grouping.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from app.measurement import emit, quiet_monitor
from benchmarks.dispatch_simulator import DispatchSimulator
from benchmarks.domain_traces import (
    DEMO_MODEL,
    NEW_TOKENS,
    cache_folder,
    data_folder,
    ensure_traces,
)
from benchmarks.recorded_engine import FOLDER_VARIABLE
from benchmarks.routed_requests import Document, RoutedRequest, read_labelled
from benchmarks.simulated_replica import MachineModel, ReplicaShape
from benchmarks.simulated_routers import Placed
from core.errors import CoterieError

Policy = Literal["experts", "least_loaded"]
POLICIES: dict[str, Policy] = {"dispatcher": "experts", "least loaded": "least_loaded"}
MODEL = "demo"
_COUNTER = re.compile(r"^coterie_(\w+?)_total\{([^}]*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Step:
    """A line of a replica's log."""

    ended_s: float
    length_s: float
    misses: int
    hits: int
    rows: int


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """What one rank recorded."""

    added: tuple[tuple[float, tuple[int, ...]], ...]
    """When each request came, and its prompt."""
    steps: tuple[Step, ...]


def read_logs(folder: Path) -> list[ReplicaLog]:
    """One for each rank that stepped."""
    logs = []
    for path in sorted(folder.glob("*.jsonl")):
        added, steps = [], []
        for line in path.read_text(encoding="utf-8").splitlines():
            kind, at_s, *rest = json.loads(line)
            if kind == "add":
                added.append((at_s, tuple(rest[0])))
            else:
                length_s, misses, hits, parts = rest
                steps.append(Step(at_s, length_s, misses, hits, sum(n for _, _, n in parts)))
        logs.append(ReplicaLog(tuple(added), tuple(steps)))
    return [log for log in logs if log.steps]


def fitted(logs: Sequence[ReplicaLog]) -> MachineModel:
    """Step times as a sum over rows and misses, by least squares with no part below 0."""
    steps = [step for log in logs for step in log.steps]
    table = np.array([[1.0, step.rows, step.misses] for step in steps])
    lengths = np.array([step.length_s for step in steps])
    # Long steps are those in which somebody else had the processor.
    usual = lengths <= np.percentile(lengths, 98)
    found = np.linalg.lstsq(table[usual], lengths[usual], rcond=None)[0].clip(0.0)
    return MachineModel(float(found[0]), float(found[1]), 0.0, float(found[2]))


def predicted(
    logs: Sequence[ReplicaLog],
    documents: dict[tuple[int, ...], Document],
    num_experts: int,
    share: float,
    sequences: int,
) -> tuple[int, int]:
    """(misses that the simulator finds for what the logs say came, misses that the pools had)."""
    came = sorted(
        (at_s, number, documents[prompt])
        for number, log in enumerate(logs)
        for at_s, prompt in log.added
        if prompt in documents
    )
    begin_s = came[0][0]
    requests = [
        RoutedRequest(at, at_s - begin_s, document) for at, (at_s, _, document) in enumerate(came)
    ]
    layers, top_k = came[0][2].expert_ids.shape[1:]
    slots = max(top_k, int(num_experts * share))
    shape = ReplicaShape(num_experts, layers, top_k, slots, sequences, fitted(logs))
    placed = [number for _, number, _ in came]
    run = DispatchSimulator(shape, len(logs), requests, lambda clock: Placed(placed), 0.0)
    run.run()
    misses = sum(replica.counts.misses for replica in run.replicas)
    measured = sum(x.misses for log in logs for x in log.steps if x.ended_s >= begin_s)
    return misses, measured


class Client:
    """Texts over HTTP, and what the replicas counted meanwhile."""

    def __init__(self, port: int) -> None:
        self._root = f"http://127.0.0.1:{port}"

    async def run(self, texts: Sequence[str], clients: int, warm_up: int) -> dict[str, Any]:
        """All texts; counters are differences from when `warm_up` of them were answered."""
        queue, answered, tokens = list(reversed(texts)), 0, 0
        limits = httpx.Limits(max_connections=None)
        before: dict[str, float] = {}
        began_s = time.monotonic()
        async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as http:

            async def ask() -> None:
                nonlocal answered, tokens, before, began_s
                while queue:
                    body = {
                        "model": MODEL,
                        "prompt": queue.pop(),
                        "max_tokens": NEW_TOKENS,
                        "temperature": 0,
                        "ignore_eos": True,
                    }
                    answer = await http.post(f"{self._root}/v1/completions", json=body)
                    if answer.status_code != 200:
                        raise CoterieError(f"answered {answer.status_code}: {answer.text[:300]}")
                    answered += 1
                    tokens += answer.json()["usage"]["completion_tokens"]
                    if answered == warm_up:
                        before = await self.counters(http)
                        began_s, tokens = time.monotonic(), 0

            await asyncio.gather(*(ask() for _ in range(clients)))
            seconds = time.monotonic() - began_s
            after = await self.counters(http)
        counted = {name: value - before.get(name, 0.0) for name, value in after.items()}
        hits, misses = counted["hits"], counted["misses"]
        return {
            "requests": len(texts) - warm_up,
            "hit_rate": round(hits / (hits + misses), 4),
            "misses": int(misses),
            "misses_per_token": round(misses / counted["tokens"], 3),
            "read_mb": round(counted["bytes"] / 1e6, 1),
            "tok_s": round(tokens / seconds, 1),
        }

    async def counters(self, http: httpx.AsyncClient) -> dict[str, float]:
        """Summed over replicas."""
        page = (await http.get(f"{self._root}/metrics")).text
        sums = dict.fromkeys(("hits", "misses", "bytes", "tokens"), 0.0)
        for name, labels, value in _COUNTER.findall(page):
            if name == "expert_accesses":
                sums["hits" if 'tier="slot"' in labels else "misses"] += float(value)
            elif name == "expert_read_bytes":
                sums["bytes"] += float(value)
            elif name in ("decode_tokens", "prefill_tokens"):
                sums["tokens"] += float(value)
        return sums


def serve_once(
    policy: Policy, texts: Sequence[str], options: argparse.Namespace, log_folder: Path
) -> dict[str, Any]:
    """A fresh service, all texts, and its end."""
    from ray import serve

    from deployments.application import application
    from deployments.dispatch_settings import DispatchSettings
    from deployments.settings import ServingSettings

    serving = ServingSettings(port=options.port, replicas=2)
    engine = {
        "threads": 1,
        "max_sequences": options.sequences,
        "batching": "fixed",
        "grouping": "off",
        "prefix_cache": False,
        "prefill_memory": 0,
        "context_tokens": 256,
    }
    pool = {
        "expert_memory": f"{options.share * 100:g}%",
        "prefetch": "off",
        "hints": "off",
        "hot_start_s": 0,
    }
    for path in log_folder.glob("*.jsonl"):
        path.unlink()
    built = application(
        MODEL,
        DEMO_MODEL,
        serving,
        engine,
        pool,
        "benchmarks.recorded_engine:open_engine",
        dispatch=DispatchSettings(policy=policy),
    )
    serve.run(built, name="dispatch-live", route_prefix="/")
    try:
        warm_up = int(len(texts) * options.warm_up)
        return asyncio.run(Client(options.port).run(texts, options.clients, warm_up))
    finally:
        serve.delete("dispatch-live")


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], Any]:
    """Both policies by turns, one row each time."""
    from deployments.model_files import open_tokenizer

    path = ensure_traces(options.cache, data_folder())
    found, num_experts = read_labelled(path)
    with np.load(path, allow_pickle=False) as stored:
        texts = stored["texts"].tolist()
    tokenizer = open_tokenizer(DEMO_MODEL)
    prompts = [tuple(tokenizer.encode(text, add_special_tokens=True).ids) for text in texts]
    documents = dict(zip(prompts, found, strict=True))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dispatch-live-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        from app.local_ray import local_ray, prepare_environment

        prepare_environment(1 << 20)
        from ray import serve

        with local_ray(num_cpus=4), quiet_monitor() as monitor:
            serve.start(http_options={"host": "127.0.0.1", "port": options.port})
            for number in range(options.rounds):
                order = np.random.default_rng(number).permutation(len(texts))[: options.requests]
                asked = [texts[at] for at in order.tolist()]
                # Who comes first alternates.
                for name in list(POLICIES)[:: -1 if number % 2 else 1]:
                    print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
                    shown = serve_once(POLICIES[name], asked, options, Path(folder))
                    logs = read_logs(Path(folder))
                    guess, measured = predicted(
                        logs, documents, num_experts, options.share, options.sequences
                    )
                    rows.append(
                        {
                            "round": number + 1,
                            "router": name,
                            "sequences": options.sequences,
                            "resident_share": options.share,
                            **shown,
                            "placed": [len(log.added) for log in logs],
                            "all_misses": measured,
                            "predicted_misses": guess,
                            "predicted_over_measured": round(guess / measured, 3),
                        }
                    )
            serve.shutdown()
    return rows, monitor


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, no table")
    parser.add_argument("--rounds", type=int, default=2, help="of both policies")
    parser.add_argument("--requests", type=int, default=180, help="of each service")
    parser.add_argument("--warm-up", type=float, default=0.4, help="share of them not counted")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8, help="engine.max_sequences")
    parser.add_argument("--share", type=float, default=0.25, help="experts with a slot")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder of traces")
    options = parser.parse_args()
    try:
        rows, monitor = run(options)
    except CoterieError as error:
        raise SystemExit(f"error: {error}") from error
    emit("dispatch_live", rows, monitor, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
