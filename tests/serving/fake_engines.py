"""An engine without a model: it emits forced ids and misbehaves on request. Runs in a rank.

The forced ids are the prompt's own, from after the last <|user|> to the last <|assistant|> where
those are. A request's seed says how to behave; see the constants.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from core.errors import BudgetError, RequestError
from core.request import Request
from core.step import SequenceOutput, StepResult, StepStats, TokenLogprob

USER, ASSISTANT, END = 265, 266, 263
VOCABULARY = 267
BLOCK_TOKENS = 16

RAISE_AT_TOKEN_3 = 1003
"""The third token is an error of this request."""
STEP_RAISES = 1004
"""The step raises: the rank reports it and ends."""
CRASH = 1005
"""The process ends in a step, without a word."""
HANG = 1006
"""The step never ends."""
SLOW_MS = 2000
"""2000 + k: each step takes at least k ms; never ends before max_tokens: the ids repeat, and
choice i begins with the i-th of them."""


@dataclass
class Sequence:
    request: Request
    index: int
    forced: tuple[int, ...]
    produced: int = 0

    @property
    def repeats(self) -> bool:
        return (self.request.params.seed or 0) >= SLOW_MS or self.request.params.ignore_eos

    @property
    def blocks(self) -> int:
        return -(-(len(self.request.prompt_ids) + self.produced + 1) // BLOCK_TOKENS)


@dataclass
class FakeEngine:
    max_sequences: int
    context_tokens: int
    kv_total: int
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.shape = SimpleNamespace(vocab_size=VOCABULARY, model_type="fake")
        self.limits = SimpleNamespace(
            context_tokens=self.context_tokens, max_sequences=self.max_sequences
        )
        self.eos_ids = (END,)

    def add(self, request: Request) -> None:
        tokens = len(request.prompt_ids)
        if -(-(tokens + 1) // BLOCK_TOKENS) > self.kv_total:
            raise RequestError(f"the prompt of {tokens} tokens needs more KV blocks than there are")
        forced = forced_ids(request.prompt_ids)
        self.waiting += [Sequence(request, index, forced) for index in range(request.n)]

    def cancel(self, request_id: str, index: int | None = None) -> None:
        def stays(sequence: Sequence) -> bool:
            mine = sequence.request.request_id == request_id
            return not (mine and index in (None, sequence.index))

        self.waiting = [sequence for sequence in self.waiting if stays(sequence)]
        self.running = [sequence for sequence in self.running if stays(sequence)]

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> StepResult:
        began = time.monotonic()
        self.steps += 1
        while self.waiting and len(self.running) < self.max_sequences:
            if self.kv_used() + self.waiting[0].blocks > self.kv_total:
                break
            self.running.append(self.waiting.pop(0))
        slow_ms = max((s.request.params.seed or 0) - SLOW_MS for s in self.running)
        if slow_ms > 0:
            time.sleep(slow_ms / 1000)
        outputs = [self.advance(sequence) for sequence in list(self.running)]
        stats = self.gauges()
        stats.step, stats.step_s = self.steps, time.monotonic() - began
        return StepResult(outputs=tuple(outputs), stats=stats)

    def advance(self, sequence: Sequence) -> SequenceOutput:
        request, seed = sequence.request, sequence.request.params.seed
        if seed == CRASH and sequence.produced == 2:
            os._exit(9)
        if seed == HANG and sequence.produced == 2:
            time.sleep(3600)
        if seed == STEP_RAISES and sequence.produced == 2:
            raise RuntimeError("the step broke")
        names: dict[str, Any] = {"request_id": request.request_id, "index": sequence.index}
        if seed == RAISE_AT_TOKEN_3 and sequence.produced == 2:
            self.running.remove(sequence)
            error = "the router produced NaN"
            return SequenceOutput(
                **names, finish_reason="error", error=error, error_type="RoutingError"
            )
        names["prompt_logprobs"] = prompt_logprobs(sequence)
        if request.params.max_tokens == 0:
            self.running.remove(sequence)
            return SequenceOutput(**names, finish_reason="length")
        position = sequence.produced
        sequence.produced += 1
        ended = not sequence.repeats and position >= len(sequence.forced)
        if sequence.repeats:
            position += sequence.index
        ids = () if ended else (sequence.forced[position % max(1, len(sequence.forced))],)
        reason = "stop" if ended else None
        if reason is None and sequence.produced >= request.params.max_tokens:
            reason = "length"
        if reason is not None:
            self.running.remove(sequence)
        logprobs: tuple[TokenLogprob, ...] = ()
        if ended:
            names["end_token_id"] = END
        if request.params.logprobs is not None:
            top = tuple((65 + rank, -0.5 - rank) for rank in range(request.params.logprobs))
            if ended:
                names["end_logprob"] = TokenLogprob(-0.75, top)
            else:
                logprobs = (TokenLogprob(-0.25, top),)
        return SequenceOutput(
            **names,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            completion_tokens=sequence.produced,
            cached_tokens=BLOCK_TOKENS if len(request.prompt_ids) > BLOCK_TOKENS else 0,
        )

    def kv_used(self) -> int:
        return sum(sequence.blocks for sequence in self.running)

    def gauges(self) -> StepStats:
        return StepStats(
            step=self.steps,
            step_s=0.0,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_blocks_used=self.kv_used(),
            kv_blocks_total=self.kv_total,
        )

    def check_invariants(self) -> None:
        if self.running or self.waiting:
            raise RuntimeError("asked for invariants while not idle")

    def close(self) -> None:
        self.running.clear()


def prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob, ...]:
    """Token i of a prompt has -i / 8, with the first choice's first output."""
    request = sequence.request
    count = request.params.prompt_logprobs
    if count is None or sequence.index or sequence.produced:
        return ()
    return tuple(
        TokenLogprob(-i / 8, tuple((65 + rank, -rank / 16) for rank in range(count)))
        for i in range(1, len(request.prompt_ids))
    )


def forced_ids(prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    ids = list(prompt_ids)
    if ids and ids[-1] == ASSISTANT:
        ids.pop()
    if USER in ids:
        ids = ids[len(ids) - ids[::-1].index(USER) :]
    return tuple(ids)


def open_engine(settings: dict[str, Any]) -> FakeEngine:
    engine = settings.get("engine", {})
    made = FakeEngine(
        int(engine.get("max_sequences", 8)),
        int(engine.get("context_tokens") or 2048),
        int(engine.get("kv_memory", 4096)),
    )
    made.shape.vocab_size = int(engine.get("vocabulary", VOCABULARY))
    return made


def open_broken_engine(settings: dict[str, Any]) -> FakeEngine:
    raise BudgetError("slots need 100 bytes, there are 10")
