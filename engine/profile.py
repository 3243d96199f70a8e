"""Runs prompts one by one through an engine and keeps what each used: experts, time, bytes."""

from __future__ import annotations

import contextlib
import itertools
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from core.errors import RequestError
from core.request import Request, SamplingParams
from engine.engine import Engine
from expert_pool.routing_recorder import Ids, RoutingRecorder


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """One prompt and the tokens generated after it."""

    label: str
    prompt_tokens: int
    expert_ids: Ids
    """[tokens that passed the model, MoE layers, k]."""
    ttft_s: float
    token_s: tuple[float, ...]
    """Of each decode step."""
    bytes_read: int
    """From disk or host, over all of its steps."""
    memory_bytes: int
    """Most resident memory of this process while it ran; since its start where the system cannot
    tell for less."""


class Profiler:
    """Owns the engine's steps while it runs. Prompts share nothing: none finds another's KV."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        layers = engine.pool.index.layers
        self.num_experts = max(layer.num_experts for layer in layers)
        self.recorder = RoutingRecorder(len(layers))
        self._numbers = itertools.count()

    def run(self, label: str, prompt_ids: list[int], new_tokens: int) -> ProfiledRun:
        """Greedy, to exactly `new_tokens` tokens. Raises RequestError for a prompt too long."""
        number = next(self._numbers)
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=f"profile-{number}",
            prompt_ids=tuple(prompt_ids),
            params=params,
            tenant=f"profile-{number}",
        )
        _forget_peak()
        pool = self.engine.pool
        pool.observer = self.recorder.note
        times, bytes_read, first_s = [], 0, None
        began = time.perf_counter()
        try:
            self.engine.add(request)
            while self.engine.has_work():
                stepped = time.perf_counter()
                result = self.engine.step()
                now = time.perf_counter()
                bytes_read += result.stats.pool.bytes_read + result.stats.pool.host_bytes
                for output in result.outputs:
                    if output.finish_reason == "error":
                        raise RequestError(f"{label}: {output.error}")
                    if output.token_ids:
                        if first_s is None:
                            first_s = now - began
                        else:
                            times.append(now - stepped)
        finally:
            pool.observer = None
        return ProfiledRun(
            label=label,
            prompt_tokens=len(prompt_ids),
            expert_ids=self.recorder.end_document(),
            ttft_s=first_s or 0.0,
            token_s=tuple(times),
            bytes_read=bytes_read,
            memory_bytes=_peak_bytes(),
        )


def _forget_peak() -> None:
    """Linux: the peak counts from now on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
