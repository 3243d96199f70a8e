"""`coterie bench`: puts a running service under load and prints what its users would feel."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from app.load.arrivals import Lengths, TokenRange, open_arrivals
from app.load.client import Endpoint, Target, first_model, root_of
from app.load.plan import Load, LoadPlan, run_plan
from app.load.sample import Sample
from app.load.server_processes import serving_roots
from app.load.summary import Objectives, summarise
from app.load.trace_file import read_trace, scaled
from app.measurement import QuietMonitor, measured
from app.plain_console import plain_console
from core.errors import SettingsError
from core.objectives import ObjectiveSettings

API_KEY_VARIABLE = "COTERIE_API_KEY"
DEFAULT_REQUESTS = 100
_OBJECTIVES = ObjectiveSettings()


def bench(
    url: Annotated[str, typer.Argument(help="Root of the service.")],
    clients: Annotated[
        str | None, typer.Option(metavar="N,N", help="Closed loop: each asks, waits, asks again.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,R", help="Open loop: requests a second.")
    ] = None,
    arrivals: Annotated[
        str, typer.Option(metavar="poisson|fixed", help="Gaps between requests of an open loop.")
    ] = "poisson",
    trace: Annotated[
        Path | None,
        typer.Option(help="Open loop from a CSV: arrival_s,prompt_tokens,output_tokens."),
    ] = None,
    speed: Annotated[float, typer.Option(help="Replays a trace so many times as fast.")] = 1.0,
    token_scale: Annotated[float, typer.Option(help="Factor on a trace's lengths.")] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests a row; 100 where no duration and no trace is given."),
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option(help="Stop sending after so many seconds a row.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N or N-M", help="Length of prompts, the template included.")
    ] = "128",
    output_tokens: Annotated[str, typer.Option(metavar="N or N-M", help="Tokens to make.")] = "64",
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--natural-ends", help="Whether answers reach their length."),
    ] = True,
    endpoint: Annotated[str, typer.Option(metavar="chat|completions")] = "chat",
    model: Annotated[str | None, typer.Option(help="Left out: the first one listed.")] = None,
    ttft_ms: Annotated[
        float, typer.Option(help="Objective: time to first token.")
    ] = _OBJECTIVES.ttft_ms,
    tpot_ms: Annotated[
        float, typer.Option(help="Objective: time per token after it.")
    ] = _OBJECTIVES.tpot_ms,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before all that are counted.")] = 4,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for one answer.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Decides times, lengths and prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Put a running service under load; print rates, latencies and goodput, a row a load.

    TTFT runs from the moment a request was due, not from when it could be sent. Tokens are the
    server's own count. Goodput is the tokens a second of requests that met both objectives. The
    environment variable COTERIE_API_KEY may hold a key. Exits 1 where a row has no answer at all.

    \b
      coterie bench http://127.0.0.1:8000 --clients 1,8,32
      coterie bench http://127.0.0.1:8000 --rate 2,4 --duration-s 60
      coterie bench http://127.0.0.1:8000 --rate 5 --arrivals fixed --json
      coterie bench http://127.0.0.1:8000 --trace rows.csv --token-scale 0.1
    """
    if requests is None and duration_s is None and trace is None:
        requests = DEFAULT_REQUESTS
    _require_positive(speed=speed, token_scale=token_scale, timeout_s=timeout_s)
    if duration_s is not None:
        _require_positive(duration_s=duration_s)
    lengths = Lengths(
        TokenRange.parse(prompt_tokens, "--prompt-tokens"),
        TokenRange.parse(output_tokens, "--output-tokens"),
    )
    kind = _one_of("--arrivals", arrivals, ("poisson", "fixed"))
    if sum(x is not None for x in (clients, rate, trace)) > 1:
        raise SettingsError("give one of --clients, --rate and --trace; each is a load of its own")
    if trace is not None:
        recorded = scaled(read_trace(trace), speed, token_scale, requests, duration_s)
        loads = [Load(arrivals=tuple(recorded))]
    elif rate is not None:
        loads = [
            Load(rate=x, arrivals=tuple(made))
            for x in _numbers("--rate", rate, float)
            for made in [open_arrivals(x, kind == "poisson", lengths, seed, requests, duration_s)]
        ]
    else:
        loads = [Load(clients=int(x)) for x in _numbers("--clients", clients or "1", int)]
    root = root_of(url)
    api_key = os.environ.get(API_KEY_VARIABLE, "")
    target = Target(
        url=root,
        endpoint=_endpoint(endpoint),
        model=model or first_model(root, api_key),
        api_key=api_key,
        timeout_s=timeout_s,
        ignore_eos=ignore_eos,
    )
    objectives = Objectives(ttft_ms, tpot_ms)
    plan = LoadPlan(tuple(loads), lengths, requests, duration_s, warm_up, seed)
    with QuietMonitor(serving_roots(root)) as monitor:
        measurements = asyncio.run(run_plan(target, plan))
    rows = [
        summarise(samples, objectives, load.clients, load.rate)
        for load, samples in zip(loads, measurements, strict=True)
    ]
    if as_json:
        print(json.dumps(measured("bench", rows, monitor)))
    else:
        _print_table(rows, measurements, monitor)
    if not all(any(x.ok for x in samples) for samples in measurements):
        raise typer.Exit(1)


def _print_table(
    rows: Sequence[dict[str, Any]], measurements: Sequence[list[Sample]], monitor: QuietMonitor
) -> None:
    console = plain_console()
    table = Table(box=None, pad_edge=False)
    headings = {
        "clients": "clients",
        "rate": "rate/s",
        "requests": "asked",
        "errors": "failed",
        "tok_s": "tokens/s",
        "goodput": "good/s",
        "ttft_p50_ms": "TTFT ms\np50",
        "ttft_p95_ms": "\np95",
        "tpot_p50_ms": "TPOT ms\np50",
        "tpot_p95_ms": "\np95",
    }
    for heading in headings.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in headings))
    console.print(table)
    for row, samples in zip(rows, measurements, strict=True):
        for error, count in row["errors"].items():
            said = next(x.message for x in samples if x.error == error)
            console.print(f"{count} x {error}: {said}", style="red")
    if not monitor.report()["quiet"]:
        used = monitor.other_cores
        console.print(f"other processes used {used:.1f} cores meanwhile", style="yellow")


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return str(sum(value.values()))
    if isinstance(value, float):
        return f"{value:.1f}"
    return "" if value is None else str(value)


def _numbers(flag: str, text: str, number: type[int] | type[float]) -> list[float]:
    try:
        values = [number(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise SettingsError(f"{flag} takes numbers above 0 such as 1,8,32, found {text!r}")
    return [float(value) for value in values]


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"{flag} takes a number above 0, found {value}")


def _one_of(flag: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise SettingsError(f"{flag} takes {' or '.join(known)}, found {value!r}")
    return value


def _endpoint(value: str) -> Endpoint:
    names: dict[str, Endpoint] = {"chat": "chat", "completions": "completions"}
    return names[_one_of("--endpoint", value, tuple(names))]
