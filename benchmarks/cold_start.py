"""What a hot list is worth to a new replica: `python -m benchmarks.cold_start --json`.

    COTERIE_DATA=FOLDER python -m benchmarks.cold_start [--json] [--cache FOLDER]

Every npz trace under $COTERIE_DATA/routing is cut into two halves by documents, odd and even. Hot
lists come from one half, hit rates from the other: each document begins in a replica of its own
with 24 of 64 slots a layer, empty or holding the hot list. "mixed" is the documents of all traces:
there "hot" is the list of all and "domain" that of the document's own trace. The peer is
"best_static", the hot list of the scored half itself, never changed. The policy is the one that a
server runs by default, without its hysteresis.

`ttft_ms` is measured on a live pool over the checkpoint "moe-s" (benchmarks/moe_s.py), whose 12
layers get the demands of the trace's first 12: the time until the experts of a document's first
token have all been there, reads from disk included, computing not. The files' pages are dropped
before each document.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.measurement import emit, quiet_monitor
from benchmarks.moe_s import LAYERS, make_moe_s
from benchmarks.offload import drop_pages
from core.errors import CoterieError
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.oracle import ABSENT
from expert_pool.policies import make_policy
from expert_pool.pool import ExpertPool
from expert_pool.popularity import Popularity
from expert_pool.routing_trace import RoutingTrace
from expert_pool.settings import PoolSettings
from expert_pool.tables import IntArray

SLOTS = 24
TOKENS = (4, 16, 128)
STARTS = ("empty", "hot", "domain", "best_static")
_TIMED_DOCUMENTS = 12
_HALF_LIFE_TOKENS = 1e9
"""Of the lists: a half counts as a whole, without decay."""


def documents(trace: RoutingTrace, half: int) -> list[IntArray]:
    """Demands [tokens, layers, k] of the odd or even documents."""
    bounds = sorted({*trace.doc_offsets.tolist(), len(trace.demands)})
    parts = [trace.demands[start:stop] for start, stop in itertools.pairwise(bounds)]
    return parts[half::2]


def popularity_of(parts: Sequence[IntArray], num_experts: int) -> Popularity:
    """Uses of each expert over whole documents."""
    layers = parts[0].shape[1]
    popularity = Popularity(layers, num_experts, _HALF_LIFE_TOKENS)
    for part in parts:
        for layer in range(layers):
            experts, counts = np.unique(part[:, layer], return_counts=True)
            seen = experts != ABSENT
            popularity.add(layer, experts[seen], counts[seen], len(part))
    return popularity


def hottest(popularity: Popularity) -> list[IntArray]:
    """The SLOTS experts of each layer that were used most."""
    return [popularity.hottest(layer, SLOTS) for layer in range(len(popularity.counts))]


def hit_rate(part: IntArray, start: list[IntArray] | None, num_experts: int) -> tuple[int, int]:
    """(hits, accesses) of one document in a cache of its own."""
    hits = accesses = 0
    policy = make_policy(PoolSettings().policy, part.shape[1], num_experts)
    resident = np.zeros((part.shape[1], num_experts), dtype=np.bool_)
    for layer, experts in enumerate(start or []):
        resident[layer, experts] = True
    for step, layer in itertools.product(range(len(part)), range(part.shape[1])):
        experts = part[step, layer][part[step, layer] != ABSENT]
        held = resident[layer]
        hits += int(held[experts].sum())
        accesses += experts.size
        policy.touch(layer, experts, np.ones_like(experts), 1)
        held[experts] = True
        excess = int(held.sum()) - SLOTS
        if excess > 0:
            others = np.setdiff1d(np.flatnonzero(held), experts)
            held[policy.victims(layer, others, excess)] = False
    return hits, accesses


def static_hit_rate(part: IntArray, lists: list[IntArray]) -> tuple[int, int]:
    """(hits, accesses) of lists that never change."""
    hits = sum(int(np.isin(part[:, layer], list_).sum()) for layer, list_ in enumerate(lists))
    return hits, int((part != ABSENT).sum())


class LiveStart:
    """A pool over moe-s in which first tokens are timed."""

    def __init__(self, model: Path) -> None:
        self._model = model
        index = CheckpointIndex.open(model)
        slot_bytes = index.layers[0].slot_bytes
        settings = PoolSettings(
            expert_memory=SLOTS * LAYERS * slot_bytes,
            verify_checksums=False,
            host_memory="off",
            hot_start_s=0,
            prefetch="off",
        )
        self._pool = ExpertPool(index, settings)

    def ttft_ms(self, part: IntArray, start: list[IntArray] | None) -> float:
        """Of one document."""
        pool = self._pool
        pool.begin_step()
        everything = np.argwhere(pool.residency.states.state != 0).tolist()
        pool.evict([(layer, expert) for layer, expert in everything])
        if start is not None:
            pool.preload([(layer, int(e)) for layer in range(LAYERS) for e in start[layer]])
            pool.settle()
        drop_pages(self._model)
        began = time.perf_counter()
        for layer in range(LAYERS):
            counts = np.zeros(pool.index.layers[layer].num_experts, dtype=np.int64)
            experts = part[0, layer]
            counts[experts[experts != ABSENT]] = 1
            for _ in pool.demand(layer, counts, 1):
                pass
        took_s = time.perf_counter() - began
        pool.end_step()
        return took_s * 1e3

    def close(self) -> None:
        """End its readers."""
        self._pool.close()


def measure(traces: dict[str, RoutingTrace], live: LiveStart, docs: int) -> list[dict[str, Any]]:
    """All rows."""
    num_experts = max(trace.num_experts for trace in traces.values())
    own = {name: popularity_of(documents(trace, 0), num_experts) for name, trace in traces.items()}
    rows = []
    for name, names in {**{name: [name] for name in traces}, "mixed": list(traces)}.items():
        hot = merged([own[one] for one in names])
        static = merged([popularity_of(documents(traces[x], 1), num_experts) for x in names])
        starts = [start for start in STARTS if start != "domain" or len(names) > 1]
        for start, tokens in itertools.product(starts, TOKENS):
            found, times = [], []
            for one in names:
                lists = {"empty": None, "hot": hot, "domain": hottest(own[one])}
                parts = [part for part in documents(traces[one], 1) if len(part) >= tokens][:docs]
                for number, part in enumerate(parts):
                    if start == "best_static":
                        found.append(static_hit_rate(part[:tokens], static))
                        continue
                    found.append(hit_rate(part[:tokens], lists[start], num_experts))
                    if number < _TIMED_DOCUMENTS and tokens == TOKENS[0]:
                        times.append(live.ttft_ms(part, lists[start]))
            if not found:
                continue
            hits, accesses = (sum(pair[at] for pair in found) for at in (0, 1))
            row = {"trace": name, "start": start, "tokens": tokens, "documents": len(found)}
            rows.append(
                {
                    **row,
                    "hit_rate": round(hits / max(accesses, 1), 4),
                    "ttft_ms": round(statistics.median(times), 1) if times else None,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def merged(parts: list[Popularity]) -> list[IntArray]:
    """The hot list of several traces, each with the same weight."""
    layers, experts = parts[0].counts.shape
    everyone = Popularity(layers, experts, _HALF_LIFE_TOKENS)
    for popularity in parts:
        everyone.merge(popularity, 1.0 / float(popularity.tokens[0]))
    return hottest(everyone)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--documents", type=int, default=64, help="scored documents of a trace")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("COTERIE_CACHE", "~/.cache/coterie")).expanduser(),
        help="folder in which moe-s (2.55 GB) is made and kept",
    )
    options = parser.parse_args()
    data = os.environ.get("COTERIE_DATA")
    if not data:
        print("error: set COTERIE_DATA to the folder whose routing/ holds traces", file=sys.stderr)
        return 1
    try:
        files = sorted((Path(data) / "routing").glob("*.npz"))
        traces = {path.stem: RoutingTrace.read(path) for path in files}
        live = LiveStart(make_moe_s(options.cache / "moe-s"))
    except CoterieError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with quiet_monitor() as monitor:
        rows = measure(traces, live, options.documents)
    live.close()
    emit("cold_start", rows, monitor, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
