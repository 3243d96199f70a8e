"""What runs inside the memory limit of `benchmarks.offload`: one contestant a process.

`python -m benchmarks.offload_contestants NAME OPTIONS-AS-JSON` prints one JSON object.
"""

from __future__ import annotations

import os

from core.torch_environment import unset_variables

os.environ.update(unset_variables())  # read once, when torch is loaded

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_TOKENS = 64


def prompt_of(seed: int, vocab_size: int) -> tuple[int, ...]:
    """The same prompt for all contestants."""
    generator = np.random.default_rng(seed)
    return tuple(int(x) for x in generator.integers(2, vocab_size, PROMPT_TOKENS))


def ours(options: dict[str, Any]) -> dict[str, Any]:
    """The engine with as many slots as fit."""
    import torch

    from core.request import Request, SamplingParams
    from core.step import StepStats
    from engine.engine import Engine

    torch.set_num_threads(options["threads"])
    began = time.perf_counter()
    engine = Engine.open(
        options["model"],
        engine={
            "max_sequences": 1,
            "context_tokens": PROMPT_TOKENS + options["new_tokens"],
            "kv_memory": "64MiB",
            "scratch_memory": "64MiB",
        },
        pool={
            "expert_memory": options["expert_memory"],
            "scratch_bytes": "64MiB",
            # The page cache counts against the limit: memory is better spent on slots.
            "host_memory": "off",
            "hot_start_s": 0,
            **options["pool"],
        },
    )
    start_s = time.perf_counter() - began
    recorder = _Recorder(engine.pool)
    steps: list[tuple[StepStats, float]] = []
    first_token_s = []
    for number in range(options["prompts"]):
        prompt = prompt_of(number, engine.shape.vocab_size)
        params = SamplingParams(
            max_tokens=options["new_tokens"],
            temperature=options["temperature"],
            seed=number,
            ignore_eos=True,
        )
        engine.add(Request(request_id=str(number), prompt_ids=prompt, params=params))
        began = time.perf_counter()
        decoding = False
        while engine.has_work():
            stepped = time.perf_counter()
            result = engine.step()
            now = time.perf_counter()
            if decoding and result.stats.decode_tokens:
                steps.append((result.stats, now - stepped))
            elif any(output.token_ids for output in result.outputs) and not decoding:
                first_token_s.append(now - began)
                decoding = True
    quotas = list(engine.pool.residency.quotas)
    engine.close()
    return {
        **_figures(steps),
        "ttft_s": round(float(np.median(first_token_s)), 3),
        "start_s": round(start_s, 1),
        "slots": sum(quotas),
        "misses_over_belady": recorder.misses_over_belady(),
        "prefetch_state": steps[-1][0].pool.prefetch.state,
    }


def _figures(steps: list[tuple[Any, float]]) -> dict[str, Any]:
    tokens = len(steps)
    pools = [stats.pool for stats, _ in steps]
    total_s = sum(seconds for _, seconds in steps)
    stall_s = np.array([pool.stall_s for pool in pools])
    read_s = sum(pool.read_s for pool in pools)
    hits = sum(pool.demand_hits for pool in pools)
    accesses = hits + sum(pool.demand_misses for pool in pools)
    both_s = max(0.0, read_s - float(stall_s.sum()))
    return {
        "tok_s": round(tokens / total_s, 2),
        "p99_stall_ms": round(float(np.quantile(stall_s, 0.99)) * 1e3, 1),
        "hit_rate": round(hits / accesses, 4),
        "bytes_per_token": round(sum(pool.bytes_read for pool in pools) / tokens),
        "reading_only_s_a_token": round(float(stall_s.sum()) / tokens, 4),
        "both_s_a_token": round(both_s / tokens, 4),
        "computing_only_s_a_token": round((total_s - float(stall_s.sum()) - both_s) / tokens, 4),
    }


class _Recorder:
    """Keeps what decode steps asked of each layer, for the optimum afterwards.

    A prompt's step asks for more than a layer holds, for which there is no optimum: each run of
    decode steps with one number of slots is one window, from the experts that were there at its
    beginning.
    """

    def __init__(self, pool: Any) -> None:
        self._layers = pool.index.layers
        self._windows: list[list[tuple[Any, int, list[Any]]]] = [[] for _ in self._layers]
        self._open = [False] * len(self._layers)
        self._misses = 0
        states, quotas, demand = pool.residency.states, pool.residency.quotas, pool.demand

        def recorded(layer: int, counts: Any, tokens: int, **named: Any) -> Any:
            if tokens == 1:
                if not self._open[layer] or self._windows[layer][-1][1] != quotas[layer]:
                    experts = np.arange(self._layers[layer].num_experts)
                    resident = states.is_resident(layer, experts)[None, :]
                    self._windows[layer].append((resident.copy(), quotas[layer], []))
                self._windows[layer][-1][2].append(np.flatnonzero(counts))
            self._open[layer] = tokens == 1
            before = pool.stats.demand_misses
            found = demand(layer, counts, tokens, **named)
            self._misses += (pool.stats.demand_misses - before) * (tokens == 1)
            return found

        pool.demand = recorded

    def misses_over_belady(self) -> float:
        """Decode misses over those of the optimum with the same slots a layer."""
        from expert_pool.oracle import belady_misses

        optimum = 0
        for layer, windows in zip(self._layers, self._windows, strict=True):
            for resident, quota, demands in windows:
                block = np.stack(demands)[:, None, :]
                optimum += int(belady_misses(block, layer.num_experts, quota, resident).sum())
        return round(self._misses / max(1, optimum), 3)


def transformers_disk(options: dict[str, Any]) -> dict[str, Any]:
    """Stock transformers; accelerate keeps the decoder layers on disk."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria
    from transformers.utils import logging

    torch.set_num_threads(options["threads"])
    logging.disable_progress_bar()
    layers = json.loads((Path(options["model"]) / "config.json").read_text())["num_hidden_layers"]
    places: dict[str, str] = {f"model.layers.{number}": "disk" for number in range(layers)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
    places["lm_head"] = "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        options["model"],
        device_map=places,
        offload_folder=options["offload_folder"],
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    times: list[float] = []

    class Clock(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    prompt = torch.tensor([prompt_of(0, model.config.vocab_size)])
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options["new_tokens"],
            do_sample=False,
            stopping_criteria=[Clock()],
        )
    return {
        "tok_s": round((len(times) - 1) / (times[-1] - times[0]), 3),
        "ttft_s": round(times[0] - began, 3),
    }


if __name__ == "__main__":
    contestants = {"ours": ours, "transformers": transformers_disk}
    print(json.dumps(contestants[sys.argv[1]](json.loads(sys.argv[2]))))
