"""A long prompt with a cache and without: `python -m benchmarks.long_prefill --json`.

The checkpoint "moe-s" (benchmarks/moe_s.py) gets a prompt of 2,048 tokens that passes layer by
layer. The peer, in the same run and alternating, is the same engine with the fewest slots that work
(top_k a layer), which keeps nothing: every expert streams through. A cache that is warm from a
short prompt must read no more bytes and take no longer than 1.05 times the peer's time. The files'
pages are dropped before each prompt.
"""

from __future__ import annotations

import os

from core.torch_environment import unset_variables

os.environ.update(unset_variables())  # read once, when torch is loaded

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.measurement import emit, quiet_monitor
from benchmarks.moe_s import make_moe_s
from benchmarks.offload import drop_pages
from core.request import Request, SamplingParams
from engine.engine import Engine

PROMPT_TOKENS = 2048
WARM_TOKENS = 32


def open_engine(model: Path, expert_memory: int | str) -> Engine:
    """One sequence at a time, reads past the page cache."""
    return Engine.open(
        model,
        engine={"max_sequences": 1, "context_tokens": PROMPT_TOKENS + WARM_TOKENS},
        pool={
            "expert_memory": expert_memory,
            "host_memory": "off",
            "hot_start_s": 0,
            "verify_checksums": False,
        },
    )


def prompt(engine: Engine, model: Path, seed: int, tokens: int) -> tuple[float, int]:
    """(seconds to the first token, bytes read) of a prompt that nobody has seen."""
    ids = np.random.default_rng(seed).integers(2, engine.shape.vocab_size, tokens)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    drop_pages(model)
    began, nbytes = time.perf_counter(), 0
    request = Request(
        request_id=str(seed), prompt_ids=tuple(ids.tolist()), params=params, tenant=str(seed)
    )
    engine.add(request)
    while engine.has_work():
        nbytes += engine.step().stats.pool.bytes_read
    return time.perf_counter() - began, nbytes


def measure(model: Path, rounds: int, shares: list[str]) -> list[dict[str, Any]]:
    """A row for each share of the experts that has slots."""
    rows = []
    for share in shares:
        cached = open_engine(model, share)
        layers = cached.pool.index.layers
        least = sum(layer.top_k * layer.slot_bytes for layer in layers)
        plain = open_engine(model, least)
        found: dict[str, list[tuple[float, int]]] = {"cached": [], "plain": []}
        for number in range(rounds):
            prompt(cached, model, 1000 + number, WARM_TOKENS)  # something to have in the cache
            # Who comes first alternates.
            order = ("cached", "plain") if number % 2 else ("plain", "cached")
            for name in order:
                engine = cached if name == "cached" else plain
                found[name].append(prompt(engine, model, number, PROMPT_TOKENS))
        cached.close()
        plain.close()
        seconds = {name: statistics.median(s for s, _ in runs) for name, runs in found.items()}
        nbytes = {name: statistics.median(b for _, b in runs) for name, runs in found.items()}
        rows.append(
            {
                "expert_memory": share,
                "prompt_tokens": PROMPT_TOKENS,
                "cached_s": round(seconds["cached"], 3),
                "plain_s": round(seconds["plain"], 3),
                "time_ratio": round(seconds["cached"] / seconds["plain"], 3),
                "cached_bytes": round(nbytes["cached"]),
                "plain_bytes": round(nbytes["plain"]),
            }
        )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shares", default="33%,66%", help="expert_memory values, comma-separated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("COTERIE_CACHE", "~/.cache/coterie")).expanduser(),
        help="folder in which moe-s (2.55 GB) is made and kept",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = make_moe_s(options.cache / "moe-s")
    with quiet_monitor() as monitor:
        rows = measure(model, options.rounds, options.shares.split(","))
    emit("long_prefill", rows, monitor, options.json)


if __name__ == "__main__":
    main()
