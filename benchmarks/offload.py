"""Experts larger than memory, under a hard limit: `python -m benchmarks.offload --json`.

The checkpoint "moe-s" (benchmarks/moe_s.py, 2.5 GB, skewed routing that depends on the content)
is served to one sequence by the engine in a memory group of 1,500 MiB, with prefetch on and off,
and by stock transformers with accelerate's disk offload in one of 2,000 MiB. Page cache counts
against the limits, and the checkpoint's pages are dropped before each contestant. Contestants run
one after the other in the same run. Where `llama-bench` is on PATH and --gguf names a
conversion of the same checkpoint, llama.cpp's mmap runs under our limit as well.

Figures are of decode steps: reading_only is time in which a token waited for reads, both is time
in which reads and computing overlapped. misses_over_belady is against the optimum of the same
slots a layer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from app.measurement import emit, quiet_monitor
from benchmarks.memory_group import MemoryGroup, NoMemoryGroupError, memory_group
from benchmarks.moe_s import make_moe_s

MIB = 1024**2
CONTESTANT_LIMIT_S = 900
ROOT = Path(__file__).resolve().parents[1]


def drop_pages(folder: Path) -> None:
    """The files below `folder` leave the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def contest(name: str, options: dict[str, Any], group: MemoryGroup | None) -> dict[str, Any]:
    """One contestant's figures, or {"error": ...} where it did not survive the limit."""
    command = [sys.executable, "-m", "benchmarks.offload_contestants", name, json.dumps(options)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            preexec_fn=group.join if group else None,
            check=False,
            timeout=CONTESTANT_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"gave no result within {CONTESTANT_LIMIT_S} s"}
    if done.returncode:
        killed = "killed at the memory limit" if done.returncode == -9 else ""
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"error": killed or last[0]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_ours(model: Path, options: argparse.Namespace, pool: dict[str, Any]) -> dict[str, Any]:
    """Our engine under its limit, from cold pages."""
    drop_pages(model)
    asked = {
        "model": str(model),
        "expert_memory": options.expert_memory_mib * MIB,
        "new_tokens": options.new_tokens,
        "temperature": options.temperature,
        "prompts": options.prompts,
        "threads": options.threads,
        "pool": pool,
    }
    with memory_group(options.limit_mib * MIB) as group:
        found = contest("ours", asked, group)
        return {**found, "peak_mib": round(group.peak_bytes() / MIB)}


def run_transformers(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The peer under its limit, in which it also writes its offload files."""
    if importlib.util.find_spec("accelerate") is None:
        return {"error": "accelerate is not installed: pip install -e .[bench]"}
    with tempfile.TemporaryDirectory(dir=options.cache, prefix="offload-") as folder:
        asked = {
            "model": str(model),
            "new_tokens": options.peer_tokens,
            "threads": options.threads,
            "offload_folder": folder,
        }
        drop_pages(model)
        with memory_group(options.peer_limit_mib * MIB) as group:
            found = contest("transformers", asked, group)
            return {**found, "peak_mib": round(group.peak_bytes() / MIB)}


def run_llama(options: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp's mmap under our limit, where it is at hand."""
    program = shutil.which("llama-bench")
    if program is None or options.gguf is None:
        return {"error": "not run: needs llama-bench on PATH and --gguf FILE"}
    drop_pages(options.gguf.parent)
    command = [program, "-m", str(options.gguf), "-p", "0", "-n", str(options.peer_tokens)]
    command += ["-r", "1", "-t", str(options.threads), "-o", "json"]
    with memory_group(options.limit_mib * MIB) as group:
        done = subprocess.run(
            command, capture_output=True, text=True, preexec_fn=group.join, check=False
        )
        if done.returncode:
            return {"error": f"exit status {done.returncode}"}
        return {"tok_s": round(json.loads(done.stdout)[0]["avg_ts"], 3)}


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of median speed; one that failed, if any did."""
    failed = [run for run in runs if "error" in run]
    return failed[0] if failed else sorted(runs, key=lambda run: run["tok_s"])[len(runs) // 2]


def rows(model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each peer, ours beside it; then ours without prefetch."""
    tried: dict[str, list[dict[str, Any]]] = {"on": [], "off": [], "auto": []}
    for number in range(options.rounds):
        # Who comes first alternates.
        for name in list(tried)[:: -1 if number % 2 else 1]:
            tried[name].append(run_ours(model, options, {"prefetch": name}))
    on, off, auto = (median_run(runs) for runs in tried.values())
    better = float(on.get("tok_s", 0)) > float(off.get("tok_s", 0))
    peers = {
        "transformers+accelerate": (options.peer_limit_mib, run_transformers(model, options)),
        "llama.cpp": (options.limit_mib, run_llama(options)),
    }
    mine = {key: value for key, value in auto.items() if key != "tok_s"}
    return [
        {
            "limit_mib": options.limit_mib,
            "ours_tok_s": auto.get("tok_s"),
            "peer": name,
            "peer_limit_mib": limit,
            "peer_tok_s": found.get("tok_s"),
            "peer_note": found.get("error"),
            **mine,
            "prefetch_on_tok_s": on.get("tok_s"),
            "prefetch_off_tok_s": off.get("tok_s"),
            "prefetch_verdict": "on is faster" if better else "off is as fast or faster",
        }
        for name, (limit, found) in peers.items()
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("COTERIE_CACHE", "~/.cache/coterie")).expanduser(),
        help="folder in which moe-s (2.55 GB) is made and kept; the peer's files lie there too",
    )
    parser.add_argument("--limit-mib", type=int, default=1500)
    parser.add_argument("--peer-limit-mib", type=int, default=2000)
    parser.add_argument(
        "--expert-memory-mib", type=int, default=850, help="slots, within the limit"
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of ours, one by one")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="ours; 0 soon repeats itself"
    )
    parser.add_argument("--peer-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3, help="runs of ours; the median counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="moe-s converted for llama.cpp")
    options = parser.parse_args()
    model = make_moe_s(options.cache / "moe-s")
    try:
        with quiet_monitor() as monitor:
            found = rows(model, options)
    except NoMemoryGroupError as error:
        raise SystemExit(f"error: {error}") from error
    emit("offload", found, monitor, options.json)


if __name__ == "__main__":
    main()
