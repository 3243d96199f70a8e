"""Recorded runs of a model, and their replay while a fuzzer moves experts about."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
import xxhash

from core.errors import BudgetError
from core.request import Request, SamplingParams
from core.step import PoolStepStats, SequencePart, StepPlan
from engine.engine import Engine
from engine.stock_runner import StockRunner
from expert_pool import expectations, forecast, label_judge, prefetch, preload, quotas, regret
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.file_reader import FileReader
from expert_pool.host_tier import HostTier
from expert_pool.policies import POLICIES
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings


@dataclass
class PlanLog:
    """What an engine ran with every expert resident, step by step."""

    engine: Engine
    index: CheckpointIndex
    plans: list[StepPlan] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    """Of the logits of each step."""
    kernel: str = "torch"
    """What computed the experts, as the pool's settings name it."""

    @property
    def runner(self) -> Any:
        return self.engine._runner

    @property
    def model(self) -> torch.nn.Module:
        runner = self.runner
        return runner._backbone.model if isinstance(runner, StockRunner) else runner._model


def hash_logits(logits: torch.Tensor) -> str:
    raw = logits.contiguous().view(torch.uint8).numpy().reshape(-1)
    return f"{tuple(logits.shape)} {xxhash.xxh3_128_hexdigest(raw.data)}"


def record(
    model_dir: Path,
    dtype: str,
    seed: int = 0,
    expert_memory: str | int = "all",
    kernel: str = "torch",
) -> PlanLog:
    """Serves a few requests, some greedy, with prompts in parts, prefix hits and preemption.

    With less than all `expert_memory`, long prompts pass layer by layer.
    """
    index = CheckpointIndex.open(model_dir, dtype)
    block_bytes = index.shape.kv_block_bytes(4)
    engine = Engine.open(
        model_dir,
        {
            "dtype": dtype,
            "max_sequences": 3,
            "max_step_tokens": 14,
            "kv_block_tokens": 4,
            "kv_memory": 20 * block_bytes,
            "context_tokens": 48,
            "scratch_memory": 2**22,
        },
        {"expert_memory": expert_memory, "read_threads": 1, "kernel": kernel},
    )
    pool = engine.pool
    # Everything is read once, so that every checksum is known later.
    pool.preload([(la.ordinal, e) for la in index.layers for e in range(la.num_experts)])
    pool.settle()
    log = PlanLog(engine, index, kernel=kernel)
    run = engine._runner.run

    def run_and_note(plan: StepPlan) -> torch.Tensor:
        logits = run(plan)
        log.plans.append(plan)
        log.hashes.append(hash_logits(logits))
        return logits

    rng = random.Random(seed)
    vocabulary = range(5, 300)
    common = tuple(rng.choices(vocabulary, k=9))
    requests = [
        Request(
            request_id=f"r{number}",
            prompt_ids=(common if number % 2 else ()) + tuple(rng.choices(vocabulary, k=length)),
            params=SamplingParams(
                max_tokens=tokens,
                temperature=0.0 if number % 2 else 1.0,
                seed=number,
                ignore_eos=True,
            ),
            n=1 + (number == 3),
        )
        for number, (length, tokens) in enumerate([(19, 6), (7, 9), (3, 8), (6, 5), (2, 4)])
    ]
    engine._runner.run = run_and_note  # type: ignore[method-assign]
    engine.generate(requests)
    engine.close()  # keeps the checksums
    del engine._runner.run  # type: ignore[method-assign]
    return log


class FuzzReader:
    """Reads the real files late, out of order, and wrongly, but never twice in a row."""

    def __init__(self, index: CheckpointIndex, seed: int) -> None:
        self._files = FileReader(index.files, direct=bool(seed % 2))
        self._expert_at = {
            (piece.file, piece.offset): (layer.ordinal, expert)
            for layer in index.layers
            for expert in range(layer.num_experts)
            for piece in index.record(layer.ordinal, expert).pieces
        }
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._thread = threading.local()
        self.faults = 0

    def read(self, file: int, offset: int, into: np.ndarray) -> None:
        with self._lock:
            delay_s = self._random.choice((0, 0, 0.0002, 0.001))
            fault = self._random.choice(("none",) * 10 + ("error", "flip"))
        time.sleep(delay_s)
        expert = self._expert_at[file, offset]
        if getattr(self._thread, "failed", None) == expert:
            fault = "none"  # this is, or may be, the second try
        elif fault != "none":
            self._thread.failed = expert
            self.faults += 1
        else:
            self._thread.failed = None
        if fault == "error":
            raise OSError(5, "Input/output error")
        self._files.read(file, offset, into)
        if fault == "flip":
            into[self._random.randrange(into.size)] ^= 1 << self._random.randrange(8)

    def close(self) -> None:
        self._files.close()


LABELS = (("", "code", "law"), ("", "s1", "s2"), ("", "ann", "bob"))
"""Domains, sessions and tenants that a replay's sequences and hints have."""


def labelled(plan: StepPlan, rng: random.Random) -> tuple[SequencePart, ...]:
    """The plan's parts with labels, which never change what is computed."""
    names = ("domain", "session", "tenant")
    return tuple(
        msgspec.structs.replace(
            part, **{name: rng.choice(some) for name, some in zip(names, LABELS, strict=True)}
        )
        for part in plan.parts
    )


class Fuzzer:
    """Moves experts about through the pool's public calls, before every access."""

    def __init__(self, pool: ExpertPool, rng: random.Random) -> None:
        self.pool = pool
        self.rng = rng

    @contextmanager
    def hooked(self, model: torch.nn.Module) -> Iterator[None]:
        """Runs before every call of an experts module of `model`."""
        hooks = [
            model.get_submodule(layer.module_name).register_forward_pre_hook(
                lambda module, args, layer=layer: self.disturb(layer.ordinal)
            )
            for layer in self.pool.index.layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def some(self, layer: int, share: float) -> list[tuple[int, int]]:
        experts = range(self.pool.index.layers[layer].num_experts)
        return [(layer, e) for e in experts if self.rng.random() < share]

    def disturb(self, layer: int) -> None:
        rng, layers = self.rng, range(len(self.pool.index.layers))
        self.pool.evict(self.some(layer, rng.choice((0.0, 0.3, 1.0))))
        if rng.random() < 0.4:
            wanted = [pair for la in layers for pair in self.some(la, 0.2)]
            rng.shuffle(wanted)
            self.pool.preload(wanted)
        if rng.random() < 0.5:
            self.pool.hint(*(rng.choice(names) for names in LABELS), first_ids=(1, 2))
        if rng.random() < 0.2 and len(layers) > 1:
            source, target = rng.sample(layers, 2)
            with suppress(BudgetError):  # out of bounds or unequal shapes: nothing moved
                self.pool.move_quota(source, target, rng.randint(1, 3))
        elif rng.random() < 0.2:
            self.pool.settle()


@contextmanager
def wild_forecasts(pool: ExpertPool, rng: random.Random) -> Iterator[None]:
    """Each predictor takes its turn, and its guesses are believed or not at random."""
    if pool.read_ahead is None:
        yield
        return
    known = pool.read_ahead.prefetcher.forecaster
    known.set_distance(rng.randint(1, min(3, len(pool.index.layers) - 1)))

    def rates(asked: np.ndarray, judged: np.ndarray) -> np.ndarray:
        return np.array([rng.random() for _ in asked], np.float32)

    with (
        patch.object(forecast, "_rates", rates),
        patch.object(known, "_choose", lambda *_: rng.choice(known._known)),
        patch.object(pool.read_ahead.prefetcher, "_least_chance", lambda: rng.random()),
    ):
        yield


@dataclass
class Replay:
    hashes: list[str]
    stats: list[PoolStepStats]
    faults: int


@patch.object(quotas, "REVIEW_STEPS", 2)
@patch.object(quotas, "_SIGMAS", -1.0)
@patch.object(regret, "WINDOW_STEPS", 3)
@patch.object(prefetch, "ALLOWANCE", 100.0)
@patch.object(forecast, "_ALL_SOURCES_EVERY", 2)
@patch.object(expectations, "LEARN_EVERY", 2)
@patch.object(label_judge, "ENOUGH_TOKENS", 4)
@patch.object(preload, "SLOTS_A_SECOND", 100.0)
@patch.object(preload, "_LEAST_RATE", 0.5)
@patch.object(preload, "_LEAST_MARGIN", -1.0)
def replay(log: PlanLog, seed: int, fuzz: bool = True, host_tier: HostTier | None = None) -> Replay:
    """Runs the log's plans with a pool drawn from `seed`: slots, policy, threads, and faults."""
    rng = random.Random(seed)
    lowest, highest = log.index.shape.min_slots_bytes, log.index.shape.all_experts_bytes
    memory = rng.choice((lowest, lowest, rng.randint(lowest, highest), highest))
    one_more = sum(layer.slot_bytes for layer in log.index.layers)
    hot = rng.random() < 0.7 and memory - lowest >= one_more
    settings = PoolSettings(
        expert_memory=memory,
        policy=tuple(POLICIES)[seed % len(POLICIES)],
        hysteresis=rng.choice((0.0, 1.0, 8.0)),
        move_quotas=rng.random() < 0.7,
        regret_layers=rng.choice((0, 4)),
        hot_set={layer.ordinal: [rng.randrange(layer.num_experts)] for layer in log.index.layers}
        if hot
        else {},
        prefetch=rng.choice(("on", "on", "auto", "off")),
        hints=rng.choice(("on", "on", "auto")),
        read_threads=rng.choice((1, 2, 3)),
        kernel=log.kernel,
    )
    reader = FuzzReader(log.index, seed)
    pool = ExpertPool(log.index, settings, reader=reader if fuzz else None, host_tier=host_tier)
    fuzzer = Fuzzer(pool, rng)
    result = Replay([], [], 0)
    try:
        pool.attach(log.model)
        with fuzzer.hooked(log.model), wild_forecasts(pool, rng):
            for plan in log.plans:
                pool.begin_step(labelled(plan, rng))
                try:
                    logits = log.runner.run(plan)
                finally:
                    result.stats.append(pool.end_step())
                result.hashes.append(hash_logits(logits))
        pool.settle()
        pool.check_invariants()
    finally:
        pool.close()
        if isinstance(log.runner, StockRunner):
            log.runner.release(list(log.runner.sequence_ids))
    result.faults = reader.faults
    return result
