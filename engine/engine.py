"""The engine of one rank: requests in, one StepResult a step out.

Needs neither Ray nor a server: `Engine.open(folder).chat(messages)` yields an answer's text.
"""

from __future__ import annotations

from core.torch_environment import prepare_torch

prepare_torch()

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.errors import CoterieError, RequestError, RoutingError
from core.model_shape import ModelShape
from core.objectives import ObjectiveSettings
from core.request import Request
from core.step import SequenceOutput, StepResult, StepStats, TokenLogprob
from engine.assembly import assemble
from engine.batcher import Batch
from engine.paged_runner import PagedRunner
from engine.prompt_scores import StepLogits
from engine.sampler import Sampled, SamplingState, sample
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.step_faults import param_at_fault, pool_faults
from engine.step_meter import StepMeter
from engine.structures import Structures
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.experts_forward import register
from expert_pool.model_location import locate
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from expert_pool.usage import warm_up

if TYPE_CHECKING:
    from engine.chat import ChatSession

_TELL_ROUTING_EVERY_S = 1.0


class Engine:
    """Owns a model's backbone, its expert pool, its KV pages and the step loop's state."""

    @classmethod
    def open(
        cls,
        model: str | Path,
        engine: EngineSettings | Mapping[str, Any] | None = None,
        pool: PoolSettings | Mapping[str, Any] | None = None,
        objectives: ObjectiveSettings | Mapping[str, Any] | None = None,
    ) -> Engine:
        """The engine of a model folder or of a hub id in the local cache."""
        return cls(
            locate(str(model)),
            EngineSettings.model_validate(engine or {}),
            PoolSettings.model_validate(pool or {}),
            ObjectiveSettings.model_validate(objectives or {}),
        )

    def __init__(
        self,
        model_dir: Path,
        engine: EngineSettings,
        pool: PoolSettings,
        objectives: ObjectiveSettings | None = None,
    ) -> None:
        """Loads the backbone and reserves pages, scratch and expert slots.

        Raises CheckpointError, SettingsError or BudgetError; nothing is served half.
        """
        if engine.threads:
            torch.set_num_threads(engine.threads)
        register()
        index = CheckpointIndex.open(model_dir, None if engine.dtype == "auto" else engine.dtype)
        self.model_dir = index.model_dir
        self.shape: ModelShape = index.shape
        self._settings = engine
        self._objectives = objectives or ObjectiveSettings()
        self._clock = time.perf_counter
        self.pool = ExpertPool(index, pool, device=engine.device)
        try:
            self._prepare(index, engine)
            warm_up(self.pool, pool.hot_start_s)
        except BaseException:
            self.pool.close()  # a refused start leaves no threads and files behind
            raise

    def _prepare(self, index: CheckpointIndex, engine: EngineSettings) -> None:
        """Everything that is made around the pool."""
        made = assemble(index, self.pool, engine, self._objectives, self._clock)
        self.eos_ids: tuple[int, ...] = made.eos_ids
        self.limits = made.limits
        self._shares_prefixes = made.shares_prefixes
        self._runner = made.runner
        self._pages = made.pages
        self._sizer = made.sizer
        self._meter = StepMeter(made.sizer, self._clock, made.batcher.order)
        self._batcher = made.batcher
        self._turns = made.turns
        self._structures = Structures(self.model_dir, self.shape.vocab_size, engine)
        self._live: dict[tuple[str, int], Sequence] = {}
        self._sampling: dict[int, SamplingState] = {}
        self._ended: list[SequenceOutput] = []
        """Outputs of sequences that ended outside of a step, for the next result."""
        self._next_sequence_id = 0
        self._steps = 0
        self._routing_told_s = -math.inf
        self._chat: ChatSession | None = None

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError, and then nothing of it is queued."""
        self.limits.check(request)
        if any(key[0] == request.request_id for key in self._live):
            raise RequestError(f"A request {request.request_id!r} is running already.")
        salt = self._salt(request)
        self._sizer.arrived(bool(self._live))
        leader: Sequence | None = None
        for index in range(request.n):
            params = request.params
            sequence = Sequence(self._next_sequence_id, request, index, salt, leader=leader)
            self._meter.stamp(sequence, request)
            leader = leader or (sequence if sequence.shares_blocks else None)
            if params.seed is not None:
                entropy = (params.seed % 2**64, index)
            else:
                entropy = (self._settings.seed, sequence.sequence_id)
            ends = params.stop_token_ids + (() if params.ignore_eos else self.eos_ids)
            state = SamplingState(params, request.prompt_ids, ends, list(entropy))
            self._sampling[sequence.sequence_id] = state
            self._next_sequence_id += 1
            self._live[request.request_id, index] = sequence
            if not self._structures.start(sequence, state):
                self._batcher.add(sequence)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one sequence of it, at once: its KV blocks are free on return.

        The next step reports it as cancelled. Unknown and finished ones are ignored.
        """
        for key in [k for k in self._live if k[0] == request_id and index in (None, k[1])]:
            sequence = self._live[key]
            self._drop(sequence)
            self._ended.append(self._output(sequence, finish_reason="cancelled"))

    def has_work(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._live or self._ended)

    def hold_s(self) -> float:
        """Seconds by which the next step may be put off, so that more sequences share it.

        Whoever steps the engine may use them to take requests and cancellations, and asks again
        after each. Always 0 unless `batching` is "frugal".
        """
        if self._ended or self._structures.waiting:
            return 0.0
        return self._meter.put_off(self._batcher.hold_s())

    def step(self) -> StepResult:
        """Runs one step. A fault ends the sequences it concerns, never the engine."""
        began = self._clock()
        self._settle_structures()
        self._meter.begin()
        batch = self._turns.next_batch()
        outputs, self._ended = self._ended, []
        for sequence in batch.outgrown:
            self._forget(sequence)
            outputs.append(self._output(sequence, finish_reason="length"))
        stats = StepStats(step=self._steps, step_s=0.0, preemptions=batch.preemptions)
        stats.prefix_hit_tokens = batch.prefix_hit_tokens
        self._steps += 1
        if batch.plan.parts:
            self._meter.planned(batch, self._batcher.limit, stats)
            outputs += self._run(batch, stats)
        elif batch.plan.released:
            self._runner.release(batch.plan.released)
        self._fill_gauges(stats)
        if self._clock() - self._routing_told_s >= _TELL_ROUTING_EVERY_S:
            self._tell_routing(stats)
        stats.step_s = self._clock() - began
        return StepResult(outputs=tuple(outputs), stats=stats)

    def gauges(self) -> StepStats:
        """The state between steps: what runs and waits, which blocks are held."""
        stats = StepStats(step=self._steps, step_s=0.0)
        self._fill_gauges(stats)
        self._tell_routing(stats)
        return stats

    def hint(
        self, domain: str, session: str = "", tenant: str = "", first_ids: Iterable[int] = ()
    ) -> None:
        """A request is coming: its experts may be read while nothing else is. Between steps."""
        self.pool.hint(domain, session, tenant, tuple(first_ids))

    def generate(self, requests: Iterable[Request]) -> dict[str, list[list[int]]]:
        """Runs requests to their end: token ids by request id, one list for each of its n.

        Raises RequestError for a request that is refused or fails.
        """
        tokens: dict[str, list[list[int]]] = {}
        for request in requests:
            self.add(request)
            tokens[request.request_id] = [[] for _ in range(request.n)]
        while self.has_work():
            for output in self.step().outputs:
                if output.error is not None:
                    raise RequestError(f"{output.request_id}: {output.error}")
                if output.request_id in tokens:
                    tokens[output.request_id][output.index] += output.token_ids
        return tokens

    def chat(self, messages: list[dict[str, Any]], **params: Any) -> Iterator[str]:
        """The answer to chat messages, piece by piece.

        `params` are fields of SamplingParams; the model's own generation_config.json supplies
        those left out, and max_tokens is what the context leaves room for.
        """
        from engine.chat import ChatSession

        if self._chat is None:
            self._chat = ChatSession(self)
        return self._chat.answer(messages, **params)

    def check_invariants(self) -> None:
        """Raises RuntimeError where books do not balance; call it when idle or in tests."""
        self._pages.check_invariants()
        self.pool.check_invariants()
        queued = len(self._batcher.running) + len(self._batcher.waiting) + self._structures.waiting
        if queued != len(self._live) or len(self._sampling) != len(self._live):
            raise RuntimeError(
                f"{len(self._live)} live sequences, {queued} queued, {len(self._sampling)} sampled"
            )
        if not self._live and self._pages.used:
            raise RuntimeError(f"idle, and {self._pages.used} KV blocks are held")

    def close(self) -> None:
        """Ends the expert pool's threads and gives its memory back."""
        self._turns.break_off()
        self._structures.close()
        self.pool.close()

    def _settle_structures(self) -> None:
        """Queues sequences whose grammar is there; ends those whose structure is complete."""
        settled = self._structures.settle(self._batcher.has_work)
        for sequence in settled.ready:
            self._batcher.add(sequence)
        for sequence in settled.finished:
            self._drop(sequence)
            self._ended.append(self._output(sequence, finish_reason="stop"))
        for sequence, error in settled.failed:
            self._ended.append(self._fail(sequence, error))

    def _run(self, batch: Batch, stats: StepStats) -> list[SequenceOutput]:
        plan = batch.plan
        try:
            self.pool.begin_step(plan.parts, in_order=plan.layer_major)
            try:
                raw = self._turns.run(batch)
            finally:
                stats.pool = self.pool.end_step()
                self._turns.note_faults(batch, stats.pool)
            if raw is None:
                stats.prefill_tokens = stats.prefix_hit_tokens = stats.kv_tokens = 0
                return []
            logits = StepLogits(plan, raw)
            faults = pool_faults(plan, stats.pool)
            wanting = [i for i, part in enumerate(plan.parts) if part.wants_logits]
            states = [self._sampling[plan.parts[i].sequence_id] for i in wanting]
            sampled = dict(zip(wanting, sample(logits.sampled, states), strict=True))
            scores = logits.scores([sequence.request for sequence in batch.sequences])
        # Whatever a step raises concerns the sequences in it; the loop goes on for the others.
        except Exception as error:
            return [self._fail(sequence, error) for sequence in batch.sequences]
        for i, found in (*sampled.items(), *scores.items()):
            if found is None and i not in faults:
                faults[i] = RoutingError("The model's output is not finite for this request.")
        self._batcher.advance(batch, frozenset(plan.parts[i].sequence_id for i in faults))
        outputs = []
        for i, sequence in enumerate(batch.sequences):
            if i in faults:
                outputs.append(self._fail(sequence, faults[i]))
            elif (token := sampled.get(i)) is not None:
                outputs.append(self._accept(sequence, token, scores.get(i) or ()))
            elif score := scores.get(i):
                outputs.append(self._output(sequence, prompt_logprobs=score))
        if not faults:
            self._meter.ended(batch, stats)
        return outputs

    def _accept(
        self, sequence: Sequence, sampled: Sampled, scores: tuple[TokenLogprob, ...]
    ) -> SequenceOutput:
        """Appends a token, or ends the sequence by it."""
        state = self._sampling[sequence.sequence_id]
        params = sequence.request.params
        if params.max_tokens == 0:
            self._drop(sequence)
            return self._output(sequence, finish_reason="length", prompt_logprobs=scores)
        token = sampled.token_id
        ends = token in params.stop_token_ids or (token in self.eos_ids and not params.ignore_eos)
        state.accept(token)
        if ends:
            self._drop(sequence)
            return self._output(
                sequence,
                finish_reason="stop",
                end_token_id=token,
                end_logprob=sampled.logprob,
                prompt_logprobs=scores,
            )
        sequence.token_ids.append(token)
        self._meter.first_token(sequence)
        full = state.generated >= params.max_tokens
        output = self._output(
            sequence,
            token_ids=(token,),
            logprobs=(sampled.logprob,) if sampled.logprob is not None else (),
            finish_reason="length" if full else None,
            prompt_logprobs=scores,
        )
        if full:
            self._drop(sequence)
        else:
            self._structures.advance(sequence, token)
        return output

    def _fail(self, sequence: Sequence, error: Exception) -> SequenceOutput:
        output = self._output(
            sequence,
            finish_reason="error",
            error=str(error) or type(error).__name__,
            error_type=type(error).__name__ if isinstance(error, CoterieError) else "CoterieError",
            error_param=param_at_fault(error, sequence.request),
        )
        self._drop(sequence, keep_content=False)
        return output

    def _drop(self, sequence: Sequence, keep_content: bool = True) -> None:
        if not self._structures.leave(sequence):  # else the batcher never had it
            self._turns.break_off(sequence)
            blank = self._batcher.remove(sequence, keep_content)
            if not keep_content and isinstance(self._runner, PagedRunner):
                self._runner.discard(blank)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._live[sequence.request.request_id, sequence.index]
        self._structures.leave(sequence)
        # At once, not with the next plan: there may be none for long.
        self._runner.release((sequence.sequence_id,))
        # Its followers need not wait for a leader that is gone.
        sequence.computed = max(sequence.computed, sequence.prompt_tokens)

    def _output(self, sequence: Sequence, **fields: Any) -> SequenceOutput:
        """`fields` are those of SequenceOutput; with a finish_reason the sequence is over."""
        state = self._sampling[sequence.sequence_id]
        if fields.get("finish_reason") is not None:
            del self._sampling[sequence.sequence_id]
        return SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            completion_tokens=state.generated,
            cached_tokens=sequence.cached_tokens,
            **fields,
        )

    def _fill_gauges(self, stats: StepStats) -> None:
        stats.running = len(self._batcher.running)
        stats.waiting = len(self._batcher.waiting) + self._structures.waiting
        stats.kv_blocks_used = self._pages.used
        stats.kv_blocks_total = self._pages.num_blocks

    def _tell_routing(self, stats: StepStats) -> None:
        stats.routing = self.pool.routing_summary()
        self._routing_told_s = self._clock()

    def _salt(self, request: Request) -> str | None:
        """Who may share the request's blocks: its tenant, or its own n sequences, or nobody."""
        if not self._shares_prefixes:
            return None
        if self._settings.prefix_cache:
            return f"tenant {request.tenant}"
        return f"request {self._next_sequence_id}" if request.n > 1 else None


def open_engine(settings: dict[str, Any]) -> Engine:
    """An engine from plain settings {"model": ..., "engine", "pool", "objectives": {...}}."""
    parts = (settings.get(name) for name in ("engine", "pool", "objectives"))
    return Engine.open(settings["model"], *parts)
