"""The supervisor, one replica of the model: keeps the queue, watches its rank, makes the text.

It never imports torch: a rank that dies takes neither the queue nor this process with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from core.errors import CoterieError, EngineUnavailableError, OverloadedError
from core.request import Request, SamplingParams
from core.step import SequenceOutput, StepResult, StepStats
from deployments.admission import Admission
from deployments.live_request import LiveRequest, failure_of
from deployments.model_files import open_pieces
from deployments.node_address import listen_on_node_address_only
from deployments.openai_errors import DeadlineError, OperatorCancelledError
from deployments.rank_channel import Add, Cancel, Hint, Idle, RankInfo, Rejected, Step, Up
from deployments.rank_process import RankProcess
from deployments.replica_news import ReplicaNews
from deployments.settings import ServingSettings, hand_over_limit
from deployments.step_totals import StepTotals
from deployments.text_delta import Failure, Generation, encode_batch
from engine.settings import EngineSettings

log = logging.getLogger("ray.serve")

_REMAKE_PAUSES_S = (0.0, 1.0, 5.0, 15.0)
_FAILURES_BEFORE_UNHEALTHY = 5
_SWEEP_S = 0.25
_WARM_UP = "warm-up"
_HINT_TOKENS = 64
_DEADLINE = "The request's deadline passed before its answer was complete."


class Supervisor:
    """Serve calls `generate`; one task owns the rank and all tables, in one event loop."""

    rank_class = RankProcess

    async def __init__(  # type: ignore[misc]  # Serve awaits an async constructor
        self,
        model_dir: str,
        serving: ServingSettings,
        engine_factory: str,
        engine_settings: dict[str, Any],
    ) -> None:
        listen_on_node_address_only()
        self._serving = serving
        self._factory = engine_factory
        self._engine_settings = engine_settings
        self._pieces = await asyncio.to_thread(open_pieces, Path(model_dir))
        self._admission = Admission(
            serving.max_queued_requests,
            serving.max_queued_prompt_tokens,
            serving.max_ongoing_requests,
            0,
            time.monotonic,
        )
        self._live: dict[str, LiveRequest] = {}
        self._rank: RankProcess | None = None
        self._info: RankInfo | None = None
        self._stats = StepStats(step=0, step_s=0.0)
        self._ready = False
        self._draining = False
        self._failures_in_a_row = 0
        self._counts = dict.fromkeys(
            ("completed", "failed", "aborted", "refused", "remakes", "steps", "idle_checks"), 0
        )
        self._counts |= {"prompt_tokens": 0, "completion_tokens": 0}
        self._totals = StepTotals()
        default = EngineSettings.model_fields["kv_block_tokens"].default
        engine = engine_settings.get("engine") or {}
        self._news = ReplicaNews(int(engine.get("kv_block_tokens", default)))
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [
            asyncio.create_task(self._supervise()),
            asyncio.create_task(self._sweep()),
        ]
        await self._first_ready

    async def generate(self, payload: bytes, ask: bytes = b"") -> AsyncIterator[bytes]:
        """Batches of text for one encoded `Generation`. Closing the iterator cancels it.

        `ask` is for the router that chose this replica.
        """
        generation = msgspec.msgpack.decode(payload, type=Generation)
        request = generation.request
        live = LiveRequest(generation, self._pieces)
        self._news.asked()
        try:
            self._admit(live)
        except CoterieError as error:
            self._counts["refused"] += 1
            yield encode_batch((Failure.of(error),))
            return
        timer = self._deadline_timer(request)
        try:
            async for batch in live.batches():
                yield encode_batch(batch)
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(request.request_id, live)

    async def info(self) -> bytes:
        """The encoded `RankInfo` of this replica's model."""
        return msgspec.msgpack.encode(self._info)

    async def status(self) -> dict[str, float]:
        """Counters and gauges as plain numbers; gauges are 0 when nothing runs."""
        return {
            "ready": int(self._ready),
            "draining": int(self._draining),
            "running": self._admission.handed_requests,
            "waiting": self._admission.queued_requests,
            "waiting_prompt_tokens": self._admission.queued_prompt_tokens,
            "engine_running": self._stats.running,
            "engine_waiting": self._stats.waiting,
            "kv_used": self._stats.kv_blocks_used,
            "kv_total": self._stats.kv_blocks_total,
            "pid": os.getpid(),
            "rank_pid": self._info.pid if self._info is not None and self._rank else 0,
            "torch_imported": int("torch" in sys.modules),
            **self._counts,
            **self._totals.as_dict(),
        }

    def record_routing_stats(self) -> dict[str, list[float]]:
        """Serve's hook, asked now and then: what the gateways' routers read of this replica."""
        ready = self._ready and not self._draining
        return {"report": self._news.floats(self._live.values(), ready, time.time())}

    async def requests(self) -> list[dict[str, str | float]]:
        """What waits or runs here, oldest first. No text of anybody's."""
        waiting = set(self._admission.queued_ids())
        return [
            {
                "request_id": request_id,
                "tenant": live.request.tenant,
                "priority": live.request.priority,
                "state": "waiting" if request_id in waiting else "running",
                "age_s": round(time.time() - live.request.arrival_s, 3),
                "prompt_tokens": len(live.request.prompt_ids),
                "max_tokens": live.request.params.max_tokens,
            }
            for request_id, live in self._live.items()
        ]

    async def cancel(self, request_id: str) -> bool:
        """End one request with an error; False where it is not here."""
        return self._end_early(
            request_id, OperatorCancelledError("The operator ended this request.")
        )

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, let running ones end; after `limit_s` end them with an error."""
        self._draining = True
        deadline = time.monotonic() + limit_s
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for request_id in list(self._live):
            self._end_early(request_id, EngineUnavailableError("the server stops"))
        while self._live and time.monotonic() < deadline + 1.0:
            await asyncio.sleep(0.02)  # until the error frames are on their way

    def check_health(self) -> None:
        """Serve replaces this replica when it cannot make a working rank any more."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise RuntimeError(f"a task of the supervisor ended: {task.exception()}")
        if self._failures_in_a_row >= _FAILURES_BEFORE_UNHEALTHY:
            raise RuntimeError(f"the rank failed to start {self._failures_in_a_row} times in a row")

    def __del__(self) -> None:
        """Serve's hook at the end of a replica: nothing of the rank stays on disk."""
        rank = getattr(self, "_rank", None)
        if rank is not None:
            rank.abandon()

    def _admit(self, live: LiveRequest) -> None:
        request = live.request
        if self._draining:
            raise OverloadedError("The server stops; no new requests.", self._serving.drain_s)
        if request.request_id in self._live:
            raise EngineUnavailableError(f"request id {request.request_id} is in use")
        patience_s = None
        if request.deadline_s is not None:
            patience_s = request.deadline_s - time.time()
            if patience_s <= 0:
                raise DeadlineError(_DEADLINE)
        self._admission.offer(
            request.request_id,
            len(request.prompt_ids),
            request.n,
            request.priority,
            request.params.max_tokens * request.n,
            patience_s,
        )
        self._live[request.request_id] = live
        self._counts["prompt_tokens"] += len(request.prompt_ids)
        self._pump()
        if self._admission.waits(request.request_id):
            self._hint(request)

    def _deadline_timer(self, request: Request) -> asyncio.TimerHandle | None:
        if request.deadline_s is None:
            return None
        return asyncio.get_running_loop().call_later(
            max(0.0, request.deadline_s - time.time()),
            lambda: self._end_early(request.request_id, DeadlineError(_DEADLINE)),
        )

    def _end_early(self, request_id: str, error: CoterieError) -> bool:
        live = self._live.get(request_id)
        if live is None or live.done:
            return False
        live.fail(Failure.of(error))
        if self._rank is not None:
            self._rank.send(Cancel(request_id))
        self._admission.leave(request_id)
        self._pump()
        return True

    def _pump(self) -> None:
        if self._rank is None or not self._ready:
            return
        for request_id in self._admission.take():
            self._rank.send(Add(self._live[request_id].request))

    def _hint(self, request: Request) -> None:
        """Its experts may be fetched while it waits."""
        if self._rank is not None and self._ready:
            self._rank.send(
                Hint(
                    request_id=request.request_id,
                    tenant=request.tenant,
                    domain=request.domain,
                    session=request.session,
                    first_ids=request.prompt_ids[:_HINT_TOKENS],
                )
            )

    def _leave(self, request_id: str, live: LiveRequest) -> None:
        """The client has its answer, or is gone."""
        if live.done:
            self._counts["failed" if live.failure is not None else "completed"] += 1
            self._counts["completion_tokens"] += live.completion_tokens
            if live.failure is None:
                self._news.answered(live.request.n, live.completion_tokens)
        else:
            self._counts["aborted"] += 1
            if self._rank is not None:
                self._rank.send(Cancel(request_id))
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._admission.leave(request_id)
        self._pump()

    async def _supervise(self) -> None:
        """Keep one rank alive, for ever; a lost one ends its requests and is made again."""
        while True:
            rank = self.rank_class(self._serving, self._factory, self._engine_settings)
            try:
                self._info = (await rank.start()).info
                self._rank = rank
                self._warm_up(rank, self._info)
                async for message in rank.messages():
                    self._take(message)
                lost: CoterieError | None = rank.lost
            # Whatever it was, this task must live: it is what makes ranks.
            except Exception as error:
                log.exception("The supervisor's hold on its rank broke")
                lost = error if isinstance(error, CoterieError) else failed_start(error)
            self._lose_rank(lost)
            await rank.close()
            if not self._first_ready.done():
                self._first_ready.set_exception(lost or failed_start(None))
                return
            pause = min(self._failures_in_a_row, len(_REMAKE_PAUSES_S) - 1)
            self._failures_in_a_row += 1
            self._counts["remakes"] += 1
            await asyncio.sleep(_REMAKE_PAUSES_S[pause])

    def _warm_up(self, rank: RankProcess, info: RankInfo) -> None:
        """One real step before the replica calls itself ready."""
        token = info.eos_ids[0] if info.eos_ids else 0
        params = SamplingParams(max_tokens=1, temperature=0.0)
        rank.send(Add(Request(request_id=_WARM_UP, prompt_ids=(token,), params=params)))

    def _become_ready(self) -> None:
        self._ready = True
        self._failures_in_a_row = 0
        if self._info is not None:
            self._admission.hand_over_sequences = hand_over_limit(self._info.max_sequences)
            self._news.max_sequences = self._info.max_sequences
        if not self._first_ready.done():
            self._first_ready.set_result(None)
        self._pump()

    def _lose_rank(self, why: CoterieError | None) -> None:
        log.error("Rank lost: %s", why)
        self._ready = False
        self._rank = None
        self._admission.lose_rank()
        self._stats = StepStats(step=0, step_s=0.0)
        self._news.lost()
        queued = set(self._admission.queued_ids())
        for request_id, live in list(self._live.items()):
            if request_id not in queued:
                live.fail(failure_of(why))
                self._admission.leave(request_id)

    def _take(self, message: Up) -> None:
        if isinstance(message, Step):
            self._counts["steps"] += 1
            self._totals.add(message.result.stats)
            self._news.step(message.result.stats)
            self._widen_choice(message.result.stats)
            self._take_step(message.result)
        elif isinstance(message, Idle):
            self._counts["idle_checks"] += message.checked
            self._stats = message.stats
            self._news.gauges(message.stats)
        elif isinstance(message, Rejected):
            live = self._live.get(message.request_id)
            if message.request_id == _WARM_UP:
                raise EngineUnavailableError(f"the first step was refused: {message.message}")
            if live is not None:
                kind, text = message.error_type, message.message
                live.fail(Failure(error_type=kind, message=text, param=message.param))

    def _widen_choice(self, stats: StepStats) -> None:
        """A rank that groups requests by their experts gets more to choose among."""
        if stats.batch is not None and self._info is not None:
            most = self._info.max_sequences
            wide = hand_over_limit(most, stats.batch.grouping != "off")
            self._admission.choice_sequences = wide - hand_over_limit(most)

    def _take_step(self, result: StepResult) -> None:
        self._stats = result.stats
        for output in result.outputs:
            if output.request_id == _WARM_UP:
                if output.finish_reason == "error":
                    raise EngineUnavailableError(f"the first step failed: {output.error}")
                if output.finish_reason is not None:
                    self._become_ready()
                continue
            live = self._live.get(output.request_id)
            if live is None:
                continue  # cancelled; the engine learns of it between steps
            self._admission.progress(output.request_id, len(output.token_ids))
            stopped = self._feed(live, output)
            if self._rank is not None and live.done and (stopped or live.failure is not None):
                self._rank.send(Cancel(output.request_id))
            elif self._rank is not None and stopped:
                self._rank.send(Cancel(output.request_id, output.index))
            if live.done:
                # Its place is free now, not when the client has read the last byte.
                self._admission.leave(output.request_id, completed=live.failure is None)
        self._pump()

    def _feed(self, live: LiveRequest, output: SequenceOutput) -> bool:
        try:
            return live.feed(output)
        # A fault in one request's text is that request's alone.
        except Exception as error:
            log.exception("Request %s failed while its text was made", output.request_id)
            live.fail(Failure.of(CoterieError(f"the answer's text could not be made: {error!r}")))
            return False

    async def _sweep(self) -> None:
        """Requests that wait too long for a rank being made again get 503."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            if self._ready:
                continue
            for request_id in self._admission.overdue(self._serving.rank_wait_s):
                error = EngineUnavailableError("the model's rank is being made again; try later")
                self._live[request_id].fail(Failure.of(error))
                self._admission.leave(request_id)


def failed_start(error: Exception | None) -> CoterieError:
    """What kept a rank from starting, where it was not one of our own errors."""
    return EngineUnavailableError(f"the rank did not start: {error!r}")
