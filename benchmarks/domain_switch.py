"""What labels and hints are worth where domains take turns: `python -m benchmarks.domain_switch`.

    COTERIE_DATA=FOLDER python -m benchmarks.domain_switch [--json] [--slots 24] [--documents 12]

The npz traces under $COTERIE_DATA/routing are the domains. A live pool of as many layers and
experts (their weights are tiny: what is counted are hits and reads, not seconds) first serves the
odd documents of all of them by turns, then is scored on the even ones, one request at a time, in
two orders: "steady" (all of one domain, then all of the next) and "by turns". Before each document
comes its hint, and its reads have time to end, as while a request is queued.

Rows {order, start, tokens, hit_rate, read_a_token, begun, useful, wasted, regretted, state}, by how
a document begins: "none" (neither labels nor hints), "hint" (its true domain), "alike" (a client
that calls everything by one name), "hint by session" (each document is a session that passed once
before). `hit_rate` is over the document's first `tokens`; `read_a_token` counts all experts read,
hints' included, over whole documents.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from app.measurement import emit, quiet_monitor
from benchmarks.cold_start import documents
from core.errors import CoterieError
from core.step import HintStats, SequencePart
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.oracle import ABSENT
from expert_pool.pool import ExpertPool
from expert_pool.routing_trace import RoutingTrace
from expert_pool.settings import PoolSettings
from expert_pool.tables import IntArray

TOKENS = (4, 16, 48)
MOST_TOKENS = 48
"""Of a document; later tokens tell nothing of its start."""
STARTS = ("none", "hint", "alike", "hint by session")
ORDERS = ("steady", "by turns")


@dataclass
class Counts:
    """Of scored documents."""

    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(TOKENS, 0))
    asked: dict[int, int] = field(default_factory=lambda: dict.fromkeys(TOKENS, 0))
    records: int = 0
    tokens: int = 0
    hints: HintStats = field(default_factory=HintStats)

    def row(self, tokens: int) -> dict[str, Any]:
        """What is printed for the first `tokens`."""
        hints = self.hints
        return {
            "tokens": tokens,
            "hit_rate": round(self.hits[tokens] / max(self.asked[tokens], 1), 4),
            "read_a_token": round(self.records / max(self.tokens, 1), 2),
            "begun": hints.begun,
            "useful": hints.useful,
            "wasted": hints.wasted,
            "regretted": hints.regretted,
            "state": hints.state,
        }


class Served:
    """A live pool that documents pass through, one token a step."""

    def __init__(
        self, index: CheckpointIndex, slots: int, hints: Literal["auto", "on", "off"]
    ) -> None:
        memory = slots * sum(layer.slot_bytes for layer in index.layers)
        self.now = 0.0
        self.pool = ExpertPool(
            index,
            PoolSettings(
                expert_memory=memory,
                hints=hints,
                prefetch="off",
                verify_checksums=False,
                host_memory="off",
                hot_start_s=0,
                regret_layers=0,
            ),
            clock=lambda: self.now,
        )
        self._number = 0

    def document(self, part: IntArray, domain: str, session: str, counts: Counts | None) -> None:
        """Its tokens pass; `counts` where it is scored."""
        pool = self.pool
        self._number += 1
        for at, token in enumerate(part[:MOST_TOKENS]):
            self.now += 0.05
            label = SequencePart(
                sequence_id=self._number,
                start=at,
                token_ids=(0,),
                block_ids=(0,),
                is_decode=at > 0,
                wants_logits=True,
                domain=domain,
                session=session,
            )
            pool.begin_step((label,))
            for layer, chosen in enumerate(token):
                experts = np.bincount(
                    chosen[chosen != ABSENT], minlength=pool.index.layers[layer].num_experts
                )
                pairs = int(experts.sum())
                for _ in pool.demand(layer, experts, 1, rows=lambda n=pairs: _one_row(n)):  # type: ignore[misc]
                    pass
            stats = pool.end_step()
            if counts is not None:
                counts.tokens += 1
                counts.records += stats.records_read
                for tokens in (t for t in TOKENS if at < t):
                    counts.hits[tokens] += stats.demand_hits
                    counts.asked[tokens] += stats.demand_hits + stats.demand_misses
                for name in ("begun", "useful", "wasted", "regretted"):
                    total = getattr(counts.hints, name) + getattr(stats.hints, name)
                    setattr(counts.hints, name, total)
                counts.hints.state = stats.hints.state

    def hint(self, domain: str, session: str) -> None:
        """It is queued for long enough that what is read for it has come."""
        self.now += 1.0
        self.pool.hint(domain, session)
        self.pool.settle()


def _one_row(pairs: int) -> IntArray:
    """The row of each (row, expert) pair where there is one row."""
    return np.zeros(pairs, np.int64)


def in_order(parts: dict[str, list[IntArray]], order: str) -> list[tuple[str, int, IntArray]]:
    """(domain, number, document) of all domains."""
    named = [[(name, at, part) for at, part in enumerate(some)] for name, some in parts.items()]
    if order == "steady":
        return list(itertools.chain.from_iterable(named))
    return [one for turn in itertools.zip_longest(*named) for one in turn if one is not None]


def score(
    index: CheckpointIndex, halves: tuple[dict[str, list[IntArray]], ...], order: str, start: str,
    slots: int, hints: Literal["auto", "on", "off"] = "auto",
) -> Counts:  # fmt: skip
    """Counts of the scored half, after the other half passed."""
    served = Served(index, slots, hints)
    names = list(halves[0])
    labelled = start != "none"
    by_session = start == "hint by session"
    for name, _, part in in_order(halves[0], "by turns"):
        served.document(part, name if labelled else "", "", None)
    if by_session:
        for name, at, part in in_order(halves[1], "by turns"):
            served.document(part, "", f"{name} {at}", None)
    counts = Counts()
    for name, at, part in in_order(halves[1], order):
        said = names[0] if start == "alike" else name
        session = f"{name} {at}" if by_session else ""
        if labelled:
            served.hint("" if by_session else said, session)
        served.document(part, said if labelled and not by_session else "", session, counts)
    served.pool.close()
    return counts


def index_of(traces: dict[str, RoutingTrace], folder: Path) -> CheckpointIndex:
    """Layers and experts as in the traces, a few bytes each."""
    fakes: Any = importlib.import_module("tests.expert_pool.fake_experts")
    first = next(iter(traces.values()))
    shape = fakes.FakeShape(
        num_layers=first.demands.shape[1],
        num_experts=max(trace.num_experts for trace in traces.values()),
        top_k=first.demands.shape[2],
        hidden=8,
        width=8,
    )
    index: CheckpointIndex = fakes.FakeIndex(folder, shape)
    return index


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--slots", type=int, default=24, help="of a layer")
    parser.add_argument("--documents", type=int, default=12, help="scored documents of a domain")
    options = parser.parse_args()
    data = os.environ.get("COTERIE_DATA")
    if not data:
        print("error: set COTERIE_DATA to the folder whose routing/ holds traces", file=sys.stderr)
        return 1
    rows = []
    try:
        files = sorted((Path(data) / "routing").glob("*.npz"))
        traces = {path.stem: RoutingTrace.read(path) for path in files}
    except CoterieError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    halves = tuple(
        {name: documents(trace, half)[: options.documents] for name, trace in traces.items()}
        for half in (0, 1)
    )
    with quiet_monitor() as monitor, tempfile.TemporaryDirectory() as folder:
        index = index_of(traces, Path(folder))
        for order, start in itertools.product(ORDERS, STARTS):
            counts = score(index, halves, order, start, options.slots)
            for tokens in TOKENS:
                rows.append({"order": order, "start": start, **counts.row(tokens)})
                print(rows[-1], file=sys.stderr, flush=True)
    emit("domain_switch", rows, monitor, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
