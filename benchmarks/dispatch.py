"""Where requests go and who is admitted, on real routing and real arrivals, in simulated time.

    COTERIE_DATA=FOLDER python -m benchmarks.dispatch [--json] [--mixes demo,esft] ...

Four replicas with slots for half of the experts each. Requests are documents of routing traces,
every domain alike often, at the spacing of a recorded service (Azure conversations): their rate is
`--load` times what least-loaded routing with full batches can do. Every router gets the same
requests; labels are wrong for 5 % of them and missing for 3 %. Batcher, admission order, eviction
with its rules and quotas, popularity, reports and dispatcher are the server's own classes; reading
ahead is left out, and a step's time is a sum with the coefficients in `step_model`. The first part
of each run is not counted. docs/dispatch_benchmark.md says how to read the rows.

Mixes: `demo`, the demo model's routing on nine domains, a row a step; `demo-served`, the same with
prompts of up to 64 rows in one step; `esft`, two domains of a DeepSeek-V2-Lite, a row a step. The
demo model's traces are made at the first run (minutes) and kept in `--cache`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from app.load.arrivals import Arrival
from app.load.trace_file import read_trace
from app.measurement import emit, quiet_monitor
from benchmarks.dispatch_simulator import Clock, DispatchSimulator, Outcome
from benchmarks.domain_traces import cache_folder, data_folder, ensure_traces
from benchmarks.routed_requests import (
    Document,
    Labelling,
    RoutedRequest,
    documents_of,
    one_by_one,
    paced,
    read_labelled,
    request_mix,
)
from benchmarks.simulated_replica import MachineModel, ReplicaShape
from benchmarks.simulated_routers import (
    DomainBound,
    Experts,
    LeastLoaded,
    LeastRows,
    PowerOfTwo,
    RoundRobin,
    Router,
)
from core.errors import CoterieError, SettingsError
from engine.settings import EngineSettings
from expert_pool.routing_trace import RoutingTrace

MIXES = ("demo", "demo-served", "esft")
BASELINE, OWN = "least_loaded", "experts"
ROUTERS = (BASELINE, "power_of_two", "round_robin", "domain_bound", OWN)
ADMISSIONS = ("fifo", "coherent")
ARRIVALS = "azure2023_conv.csv"
_ESFT_DOMAINS = ("intent", "law")


@dataclass(frozen=True, slots=True)
class Mix:
    """Documents of one model, and what it runs on."""

    documents: Sequence[Document]
    num_experts: int
    machine: MachineModel
    expert_bytes: int
    rows: tuple[int, int] | None
    """Bounds to which documents are cut by the lengths of recorded answers; None: whole."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    mix: str
    sequences: int
    load: float
    router: str
    admission: str
    seed: int


def read_mix(name: str, cache: Path) -> Mix:
    """The documents of a mix. Raises SettingsError for an unknown one, or without data."""
    if name not in MIXES:
        raise SettingsError(f"expected mixes among {', '.join(MIXES)}, found {name!r}")
    data = data_folder()
    if name == "esft":
        documents = [
            document
            for domain in _ESFT_DOMAINS
            for document in documents_of(
                RoutingTrace.read(data / "routing" / f"esft_lite_{domain}.npz"), domain
            )
        ]
        # bf16 experts of 3 x 2048 x 1408; a link of 25 GB/s, a device that reads 1 TB/s.
        nbytes = 2 * 3 * 2048 * 1408
        machine = MachineModel(0.005, 0.0002, nbytes / 1e12, nbytes / 25e9)
        return Mix(documents, 64, machine, nbytes, (16, 128))
    documents, num_experts = read_labelled(ensure_traces(cache, data))
    nbytes = 2 * 3 * 192 * 64
    machine = MachineModel(0.003, 0.0002, 0.00002, 0.0002)
    if name == "demo-served":
        return Mix(documents, num_experts, machine, nbytes, None)
    return Mix(one_by_one(documents), num_experts, machine, nbytes, (16, 112))


def make_router(
    name: str, seed: int, clock: Clock, domains: Sequence[str], replicas: int
) -> Router:
    """By name. Raises SettingsError for an unknown one."""
    makers: dict[str, Callable[[], Router]] = {
        BASELINE: lambda: LeastLoaded(seed),
        "least_rows": lambda: LeastRows(seed),
        "power_of_two": lambda: PowerOfTwo(seed),
        "round_robin": lambda: RoundRobin(seed),
        "domain_bound": lambda: DomainBound(seed, domains, replicas),
        OWN: lambda: Experts(seed, clock),
    }
    if name not in makers:
        raise SettingsError(f"expected routers among {', '.join(makers)}, found {name!r}")
    return makers[name]()


def capacity(shape: ReplicaShape, replicas: int, requests: Sequence[RoutedRequest]) -> float:
    """Requests a second of least-loaded routing when all have come at once."""
    at_once = [replace(routed, at_s=0.0) for routed in requests]
    run = DispatchSimulator(shape, replicas, at_once, lambda clock: LeastLoaded(0), 0.0)
    finished = run.run().finished
    # Until the first replica may run dry; what comes after is not at full batches.
    ends = sorted(one.ended_s for one in finished)
    most = max(1, len(ends) * 9 // 10)
    return most / ends[most - 1]


class Bench:
    """Runs cases of one mix at one number of sequences, with equal requests for all of them."""

    def __init__(
        self, mix: Mix, sequences: int, options: argparse.Namespace, arrivals: Sequence[Arrival]
    ) -> None:
        layers, top_k = mix.documents[0].expert_ids.shape[1:]
        slots = max(top_k, round(mix.num_experts * options.share))
        self.shape = ReplicaShape(mix.num_experts, layers, top_k, slots, sequences, mix.machine)
        self.domains = sorted({document.domain for document in mix.documents})
        self._mix = mix
        self._options = options
        self._arrivals = arrivals
        self._requests: dict[int, tuple[list[RoutedRequest], float]] = {}

    def run(self, case: Case) -> Outcome:
        """One case."""
        options, replicas = self._options, self._options.replicas
        if case.seed not in self._requests:
            labelling = Labelling(options.wrong_labels, options.unknown_labels)
            made = request_mix(
                self._mix.documents,
                self._arrivals,
                options.requests,
                case.seed,
                labelling,
                self._mix.rows,
            )
            some = made[: max(40, len(made) // 3)]
            self._requests[case.seed] = made, capacity(self.shape, replicas, some)
        requests, most = self._requests[case.seed]
        grouping = EngineSettings().max_overtakes if case.admission == "coherent" else None
        return DispatchSimulator(
            replace(self.shape, max_overtakes=grouping),
            replicas,
            paced(requests, most * case.load),
            lambda clock: make_router(case.router, case.seed, clock, self.domains, replicas),
            options.warm_up,
        ).run()


def measure(name: str, sequences: int, seed: int, options: argparse.Namespace) -> list[Any]:
    """[(case, what it showed)] of all routers and admissions with one seed."""
    mix = read_mix(name, options.cache)
    bench = Bench(mix, sequences, options, read_trace(data_folder() / "traces" / ARRIVALS))
    found = []
    for load in options.load:
        for router in options.routers:
            for admission in options.admissions:
                if admission == "coherent" and router not in (BASELINE, OWN):
                    continue
                case = Case(name, sequences, load, router, admission, seed)
                outcome = bench.run(case)
                found.append((case, figures(outcome, mix, bench.shape)))
                shown = f"{outcome.misses_per_token:.2f} misses a token"
                print(f"{case}: {shown}", file=sys.stderr, flush=True)
    return found


def figures(outcome: Outcome, mix: Mix, shape: ReplicaShape) -> dict[str, float]:
    """Plain numbers of one run."""
    counts, layers = outcome.counts, shape.layers
    full = counts.full_accesses / counts.full_steps / layers if counts.full_steps else float("nan")
    return {
        "misses_per_token": outcome.misses_per_token,
        "hit_rate": outcome.hit_rate,
        "bytes_per_token": outcome.misses_per_token * mix.expert_bytes,
        "queue_p50_s": outcome.queue_s(50),
        "queue_p95_s": outcome.queue_s(95),
        "latency_p50_s": outcome.latency_s(50),
        "distinct_per_step": counts.accesses / counts.steps / layers,
        "distinct_per_full_step": full,
        "rows_per_step": counts.rows / counts.steps,
        "tok_s": counts.rows / outcome.seconds,
        "busiest_over_mean": max(c.rows for c in outcome.by_replica)
        * len(outcome.by_replica)
        / counts.rows,
    }


def rows_of(found: Iterable[tuple[Case, dict[str, float]]]) -> list[dict[str, Any]]:
    """One row a (mix, sequences, load, router, admission): means over seeds, and the changes
    against least-loaded routing in order of arrival with the same seed, with their spread."""
    by_case = dict(found)
    rows = []
    for case in by_case:
        seeds = [other for other in by_case if replace(other, seed=case.seed) == case]
        if seeds[0] != case:
            continue
        figures_of = [by_case[other] for other in seeds]
        row: dict[str, Any] = {
            "mix": case.mix,
            "router": case.router,
            "admission": case.admission,
            "sequences": case.sequences,
            "load": case.load,
            "seeds": len(seeds),
        }
        for key in figures_of[0]:
            row[key] = _rounded(float(np.mean([one[key] for one in figures_of])))
        for name, key, router in (
            ("misses_change", "misses_per_token", BASELINE),
            ("queue_p95_change", "queue_p95_s", BASELINE),
            ("distinct_change_by_admission", "distinct_per_full_step", case.router),
            ("queue_p95_change_by_admission", "queue_p95_s", case.router),
        ):
            pairs = [
                (by_case.get(replace(one, router=router, admission="fifo")), by_case[one])
                for one in seeds
            ]
            changes = [b[key] / a[key] - 1.0 for a, b in pairs if a is not None and a[key] > 0]
            if changes:
                row[name] = round(float(np.mean(changes)), 3)
                row[f"{name}_range"] = [round(min(changes), 3), round(max(changes), 3)]
        rows.append(row)
    return rows


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, several processes at once where asked for."""
    if any(name.startswith("demo") for name in options.mixes):
        ensure_traces(options.cache, data_folder())
    jobs = [
        (name, sequences, seed, options)
        for name in options.mixes
        for sequences in options.sequences
        for seed in range(options.first_seed, options.first_seed + options.seeds)
    ]
    if options.processes == 1:
        found = [one for job in jobs for one in measure(*job)]
    else:
        with ProcessPoolExecutor(options.processes) as pool:
            parts = list(pool.map(measure, *zip(*jobs, strict=True)))
        found = [one for part in parts for one in part]
    rows = rows_of(found)
    for row in rows:
        machine = read_mix(row["mix"], options.cache).machine
        row["step_model"] = (
            f"{machine.step_s * 1e3:g} ms + {machine.row_s * 1e3:g} a row + "
            f"{machine.expert_s * 1e3:.3g} an expert + {machine.miss_s * 1e3:.3g} a miss"
        )
    return rows


def main() -> int:
    """Command line."""

    def split(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, no table")
    parser.add_argument("--mixes", type=split, default=["demo", "esft"], help=", ".join(MIXES))
    parser.add_argument(
        "--routers", type=split, default=list(ROUTERS), help=f"{', '.join(ROUTERS)}, least_rows"
    )
    parser.add_argument("--admissions", type=split, default=list(ADMISSIONS))
    parser.add_argument(
        "--sequences", type=lambda x: [int(n) for n in split(x)], default=[4, 8, 16]
    )
    parser.add_argument("--load", type=lambda x: [float(n) for n in split(x)], default=[1.0, 1.2])
    parser.add_argument("--share", type=float, default=0.5, help="experts with a slot")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--warm-up", type=float, default=0.4, help="share of them not counted")
    parser.add_argument("--seeds", type=int, default=2, help="runs with other requests each")
    parser.add_argument("--first-seed", type=int, default=0, help="for requests nobody tuned on")
    parser.add_argument("--wrong-labels", type=float, default=Labelling().wrong)
    parser.add_argument("--unknown-labels", type=float, default=Labelling().unknown)
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder of traces")
    options = parser.parse_args()
    try:
        with quiet_monitor() as monitor:
            rows = run(options)
    except CoterieError as error:
        raise SystemExit(f"error: {error}") from error
    emit("dispatch", rows, monitor, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
