"""The same question to the real engine on its own clock: rows of benchmarks/batch_sizing.py.

The demo model, in this process, at a third of the requests a second that it completes when all come
at once. The objectives are made from its own step: three full steps a token, sixty to the first.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from core.objectives import ObjectiveSettings
from core.request import Request, SamplingParams
from core.step import StepStats
from engine.engine import Engine

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
SEQUENCES = 32
LOAD = 0.3
_PROMPT_TOKENS, _ANSWER_TOKENS = (8, 96), (24, 96)


class LiveRun:
    """Requests at given times, stepped as a rank does: a step when it is due, news at once."""

    def __init__(self, batching: str, objectives: ObjectiveSettings) -> None:
        self._engine = Engine.open(
            DEMO_MODEL,
            {"batching": batching, "max_sequences": SEQUENCES, "context_tokens": 256},
            {"expert_memory": "all"},
            objectives,
        )
        self._engine.pool.settle()
        self._objectives = objectives
        self._arrived_s: dict[str, float] = {}
        self._first_s: dict[str, float] = {}
        self.each_s: list[float] = []
        self.steps: list[StepStats] = []

    def run(self, arrivals: list[tuple[float, Request]]) -> float:
        """Seconds until all are done."""
        engine, began_s = self._engine, time.perf_counter()
        queue = list(reversed(arrivals))
        while queue or engine.has_work():
            now_s = time.perf_counter() - began_s
            while queue and queue[-1][0] <= now_s:
                at_s, request = queue.pop()
                self._arrived_s[request.request_id] = at_s
                engine.add(request)
            wait_s = engine.hold_s() if engine.has_work() else float("inf")
            if wait_s > 0:
                time.sleep(max(0.0, min([wait_s, *(at_s - now_s for at_s, _ in queue[-1:])])))
                if queue and queue[-1][0] <= time.perf_counter() - began_s:
                    continue
            if engine.has_work():
                self._step(began_s)
        return time.perf_counter() - began_s

    def close(self) -> None:
        """Gives the engine's memory back."""
        self._engine.close()

    def row(self) -> dict[str, Any]:
        """What came of it."""
        tokens = sum(stats.decode_tokens + stats.prefill_tokens for stats in self.steps)
        distinct = sum(stats.pool.demand_hits + stats.pool.demand_misses for stats in self.steps)
        layers = self._engine.shape.moe_layers
        waits_s = [first_s - self._arrived_s[name] for name, first_s in self._first_s.items()]
        ttft_s, tpot_s = self._objectives.ttft_ms / 1e3, self._objectives.tpot_ms / 1e3
        batches = [stats.batch for stats in self.steps if stats.batch is not None]
        return {
            "effective_activation_ratio": round(
                distinct / tokens / sum(layer.num_experts for layer in layers), 5
            ),
            "distinct_per_step": round(distinct / len(self.steps), 1),
            "bytes_per_token": round(distinct / tokens * layers[0].expert_bytes),
            "ttft_attainment": round(float(np.mean([wait <= ttft_s for wait in waits_s])), 4),
            "tpot_attainment": round(float(np.mean([each <= tpot_s for each in self.each_s])), 4),
            "steps": len(self.steps),
            "held_s": round(sum(batch.held_s for batch in batches), 2),
            "model_error": round(batches[-1].model_error, 3),
        }

    def _step(self, began_s: float) -> None:
        result = self._engine.step()
        now_s = time.perf_counter() - began_s
        self.steps.append(result.stats)
        for output in result.outputs:
            name = output.request_id
            if output.completion_tokens == 1:
                self._first_s[name] = now_s
            elif output.finish_reason is not None:
                rest = output.completion_tokens - 1
                self.each_s.append((now_s - self._first_s[name]) / rest)


def _requests(count: int, per_s: float) -> list[tuple[float, Request]]:
    draw = np.random.default_rng(3)
    found, at_s = [], 0.0
    for number in range(count):
        at_s += draw.exponential(1 / per_s) if per_s else 0.0
        prompt = tuple(draw.integers(5, 500, int(draw.integers(*_PROMPT_TOKENS))).tolist())
        params = SamplingParams(
            max_tokens=int(draw.integers(*_ANSWER_TOKENS)), temperature=0.0, ignore_eos=True
        )
        request = Request(request_id=f"r{number}", prompt_ids=prompt, params=params)
        found.append((at_s, request))
    return found


def live_rows(requests: int) -> list[dict[str, Any]]:
    """One row a policy; they run one after another, after a run that measures the capacity."""
    loosest = ObjectiveSettings(ttft_ms=1e6, tpot_ms=1e6)
    probe = LiveRun("fixed", loosest)
    probe.run(_requests(SEQUENCES, 0.0))  # warms up
    probe.steps.clear()
    capacity = requests / probe.run(_requests(requests, 0.0))
    full_s = float(np.median([s.step_s for s in probe.steps if s.decode_tokens >= SEQUENCES // 2]))
    probe.close()
    objectives = ObjectiveSettings(ttft_ms=60e3 * full_s, tpot_ms=3e3 * full_s)
    rows = []
    for batching in ("fixed", "dynamic", "frugal"):
        run = LiveRun(batching, objectives)
        run.run(_requests(requests, LOAD * capacity))
        rows.append(
            {
                "what": "demo model",
                "policy": f"fixed {SEQUENCES}" if batching == "fixed" else batching,
                "load": LOAD,
                **run.row(),
                **{name: round(value, 1) for name, value in objectives.model_dump().items()},
                "capacity_requests_s": round(capacity, 1),
            }
        )
        run.close()
    return rows
