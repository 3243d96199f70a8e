"""A decoding step of the engine against stock transformers: `python -m benchmarks.engine_step`.

Both hold all experts in memory and decode the same prompts greedily, one step of ours after each
step of `generate` (grouped_mm, sdpa, dynamic cache), so that whatever else the machine does meets
both alike. Medians over the steps. The floor is the time in which the bytes that a step must read
(distinct experts touched, the backbone without its embedding table, KV) pass at the read bandwidth
measured here; s_mbu is floor / ours. Without --model it makes "moe-s" (benchmarks/moe_s.py).
"""

from __future__ import annotations

import os

from core.torch_environment import unset_variables

os.environ.update(unset_variables())  # read once, when torch is loaded

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.utils import logging

from app.measurement import emit, quiet_monitor
from benchmarks.moe_s import make_moe_s
from core.request import Request, SamplingParams
from core.step import StepResult
from engine.engine import Engine

PROMPT_TOKENS = 64
_WARM_STEPS = 2
_BANDWIDTH_BYTES = 512 * 1024**2


def read_bandwidth() -> float:
    """Bytes a second that torch's threads read together, the best of several passes."""
    block = torch.ones(_BANDWIDTH_BYTES // 4)
    best_s = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        block.sum()
        best_s = min(best_s, time.perf_counter() - began)
    return _BANDWIDTH_BYTES / best_s


def open_engine(model_dir: Path, max_sequences: int, new_tokens: int) -> Engine:
    """An engine whose experts are all resident."""
    engine = Engine.open(
        model_dir,
        engine={
            "max_sequences": max_sequences,
            "context_tokens": PROMPT_TOKENS + new_tokens,
            "kv_memory": "8GiB",
        },
        pool={"expert_memory": "all", "verify_checksums": False},
    )
    engine.pool.settle()
    return engine


def step_bytes(engine: Engine, result: StepResult, cached_tokens: int) -> int:
    """What the step had to read: distinct experts, dense weights, keys and values."""
    shape = engine.shape
    stats = result.stats.pool
    expert_bytes = shape.moe_layers[0].expert_bytes
    embedding = shape.vocab_size * shape.hidden_size * shape.dtype_bytes
    if engine.pool.index.config.tie_word_embeddings:
        embedding = 0  # the output layer reads the same table
    distinct = stats.demand_hits + stats.demand_misses
    kv_bytes = cached_tokens * shape.kv_block_bytes(1)
    return distinct * expert_bytes + shape.backbone_bytes - embedding + kv_bytes


class Alternating(StoppingCriteria):
    """Called by `generate` after each of its steps: takes its time, and lets ours step once."""

    def __init__(self, engine: Engine, batch: int, bandwidth: float) -> None:
        self.stock_ms: list[float] = []
        self.ours_ms: list[float] = []
        self.floor_ms: list[float] = []
        self._engine = engine
        self._batch = batch
        self._bandwidth = bandwidth
        self._length = PROMPT_TOKENS + 1
        self._began: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Never stops the generation."""
        now = time.perf_counter()
        if self._began is not None:
            self.stock_ms.append((now - self._began) * 1e3)
        began = time.perf_counter()
        result = self._engine.step()
        if result.stats.decode_tokens == self._batch:
            # Steps after the first sequence has ended are not what is measured.
            self.ours_ms.append((time.perf_counter() - began) * 1e3)
            nbytes = step_bytes(self._engine, result, self._batch * self._length)
            self.floor_ms.append(nbytes / self._bandwidth * 1e3)
        self._length += 1
        self._began = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def measure(
    engine: Engine, stock: Any, batch: int, new_tokens: int, bandwidth: float
) -> dict[str, Any]:
    """One row of the table."""
    vocab = engine.shape.vocab_size
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(2, vocab, (batch, PROMPT_TOKENS), generator=generator)
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts.tolist()):
        name = f"{batch}-{number}"
        engine.add(Request(request_id=name, prompt_ids=tuple(prompt), params=params, tenant=name))
    started = 0
    while started < batch:
        started += sum(output.completion_tokens == 1 for output in engine.step().outputs)
    watch = Alternating(engine, batch, bandwidth)
    with torch.inference_mode():
        stock.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=[watch],
        )
    while engine.has_work():
        engine.step()
    count = min(len(watch.ours_ms), len(watch.stock_ms))
    if count <= _WARM_STEPS:
        raise SystemExit(f"batch {batch}: only {count} steps ran all sequences; raise --new-tokens")
    ours, theirs, floor = (
        statistics.median(values[_WARM_STEPS:count])
        for values in (watch.ours_ms, watch.stock_ms, watch.floor_ms)
    )
    return {
        "batch": batch,
        "ours_ms": round(ours, 2),
        "stock_ms": round(theirs, 2),
        "ratio": round(theirs / ours, 3),
        "tok_s": round(batch / ours * 1e3, 1),
        "floor_ms": round(floor, 2),
        "s_mbu": round(floor / ours, 3),
    }


def open_stock(model_dir: Path) -> Any:
    """The peer, told not to stop at an end token."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).eval()
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: moe-s")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("COTERIE_CACHE", "~/.cache/coterie")).expanduser(),
        help="folder in which moe-s (2.55 GB) is made and kept",
    )
    parser.add_argument("--sizes", default="1,4,16,32", help="batch sizes, comma-separated")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    sizes = [int(size) for size in options.sizes.split(",")]
    model_dir = options.model or make_moe_s(options.cache / "moe-s")
    engine = open_engine(model_dir, max(sizes), options.new_tokens)
    stock = open_stock(model_dir)
    bandwidth = read_bandwidth()
    rows = []
    with quiet_monitor() as monitor:
        for batch in sizes:
            row = measure(engine, stock, batch, options.new_tokens, bandwidth)
            rows.append({**row, "read_gb_s": round(bandwidth / 1e9, 1)})
            print(row, file=sys.stderr, flush=True)
    engine.close()
    emit("engine_step", rows, monitor, as_json=options.json)


if __name__ == "__main__":
    main()
