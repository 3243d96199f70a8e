"""The gateway: checks a request, makes token ids of it, sends it on, writes the answer.

Nothing here imports torch or Ray; `supervisor_client` is the way to the model.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from core.errors import CoterieError, EngineUnavailableError, RequestError
from core.request import Request
from deployments.openai_errors import (
    ContextLengthError,
    ModelNotFoundError,
    envelope,
    exception_of,
)
from deployments.openai_schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    parse_body,
)
from deployments.openai_stream import DONE, Answer, Json, event
from deployments.rank_channel import RankInfo
from deployments.settings import ServingSettings
from deployments.text_delta import Batch, Failure, Generation, TextDelta
from deployments.tokenizer_worker import TokenizerWorker
from engine.sampling_defaults import sampling_defaults

log = logging.getLogger("ray.serve")

_STATUS_TIMEOUT_S = 2.0


class BatchStream(Protocol):
    """The batches of one request, until it ends or is cancelled."""

    def __aiter__(self) -> AsyncIterator[Batch]:
        """Itself."""

    async def __anext__(self) -> Batch:
        """The next batch."""

    def cancel(self) -> None:
        """Free the request's place; may be repeated."""


class Supervisors(Protocol):
    """What a gateway needs of the model's replicas."""

    def generate(self, generation: Generation) -> BatchStream:
        """Start a request."""

    async def info(self, timeout_s: float) -> RankInfo:
        """What a replica says of its model."""

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        """One status a running replica."""


@dataclass(frozen=True, slots=True)
class EventStream:
    """A started stream: server-sent events, and how to give it up."""

    events: AsyncIterator[bytes]
    cancel: Callable[[], None]


class Gateway:
    """Requests in, answers out; one instance a gateway process."""

    def __init__(
        self,
        model_name: str,
        model_dir: Path,
        serving: ServingSettings,
        supervisors: Supervisors,
        idle_status: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`idle_status` tells the model deployment's state where it may run zero replicas."""
        self.model_name = model_name
        self.serving = serving
        self._supervisors = supervisors
        self._idle_status = idle_status
        self._tokenizer = TokenizerWorker.open(model_dir)
        self._defaults = sampling_defaults(model_dir)
        self._started = int(time.time())
        self._info: RankInfo | None = None
        self._open_requests = 0

    async def chat(self, body: bytes) -> Json | EventStream:
        """POST /v1/chat/completions. Raises CoterieError."""
        asked = await self._parse(ChatRequest, body)
        self._check_model(asked.model)
        messages = [message.for_template() for message in asked.messages]
        kwargs = asked.chat_template_kwargs or {}
        return await self._answer("chat", asked, lambda: self._tokenizer.chat_ids(messages, kwargs))

    async def completion(self, body: bytes) -> Json | EventStream:
        """POST /v1/completions. Raises CoterieError."""
        asked = await self._parse(CompletionRequest, body)
        self._check_model(asked.model)
        return await self._answer(
            "completion", asked, lambda: self._tokenizer.prompt_ids(asked.prompt)
        )

    def models(self) -> Json:
        """GET /v1/models."""
        return {"object": "list", "data": [self.model(self.model_name)]}

    def model(self, name: str) -> Json:
        """GET /v1/models/{name}. Raises ModelNotFoundError."""
        self._check_model(name)
        return {"id": name, "object": "model", "created": self._started, "owned_by": "coterie"}

    async def ready(self) -> tuple[bool, Json]:
        """GET /ready: whether a replica has run a real step, or one may be started on demand."""
        if self._idle_status is not None:
            state = await self._idle_status()
            if state == "idle":
                return True, {"ready": True, "replicas": 0, "ready_replicas": 0}
            if state != "running":
                return False, {"ready": False, "reason": f"the model's deployment is {state}"}
        statuses = await self._supervisors.statuses(_STATUS_TIMEOUT_S)
        ready = sum(1 for status in statuses if status["ready"])
        counts = {"replicas": len(statuses), "ready_replicas": ready}
        return ready > 0, {"ready": ready > 0, **counts}

    def status(self) -> dict[str, float]:
        """Plain numbers about this process."""
        return {
            "pid": os.getpid(),
            "torch_imported": int("torch" in sys.modules),
            "open_requests": self._open_requests,
        }

    async def _answer(
        self,
        endpoint: Literal["chat", "completion"],
        asked: SamplingFields,
        tokenise: Callable[[], Awaitable[tuple[int, ...]]],
    ) -> Json | EventStream:
        if asked.stream_options is not None and not asked.stream:
            raise RequestError("stream_options needs stream to be true.", "stream_options")
        stop = asked.stop_strings(self.serving)
        choices = asked.choices(self.serving)
        prompt_ids = await tokenise()
        request = await self._request(endpoint, asked, prompt_ids, choices)
        stream = self._supervisors.generate(
            Generation(request=request, stop=stop, stream=bool(asked.stream))
        )
        answer = Answer(
            endpoint,
            request.request_id,
            self.model_name,
            len(prompt_ids),
            request.params.logprobs is not None,
            asked.include_usage,
        )
        self._open_requests += 1
        try:
            # The first batch decides the HTTP status: a refusal is no stream.
            first = await _first_batch(stream)
        except BaseException:
            self._close(stream)
            raise
        if not asked.stream:
            self._close(stream)
            return answer.body([delta for delta in first if isinstance(delta, TextDelta)])
        open_stream = [stream]

        def cancel() -> None:
            if open_stream:
                self._close(open_stream.pop())

        return EventStream(_events(answer, first, stream), cancel)

    async def _request(
        self,
        endpoint: str,
        asked: SamplingFields,
        prompt_ids: tuple[int, ...],
        choices: int,
    ) -> Request:
        param = "messages" if endpoint == "chat" else "prompt"
        if not prompt_ids:
            raise RequestError("The prompt has no tokens.", param)
        info = await self._rank_info()
        if max(prompt_ids) >= info.vocab_size:
            raise RequestError(
                f"expected token ids from 0 to {info.vocab_size - 1}, found {max(prompt_ids)}.",
                param,
            )
        try:
            params = asked.sampling(
                len(prompt_ids),
                info.context_tokens,
                info.vocab_size,
                self._defaults,
                self.serving.default_max_tokens,
            )
        except ContextLengthError as error:
            raise ContextLengthError(str(error), error.param or param) from error
        prefix = "chatcmpl" if endpoint == "chat" else "cmpl"
        return Request(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            prompt_ids=prompt_ids,
            params=params,
            n=choices,
            arrival_s=time.time(),
        )

    async def _parse(self, model: type[Body], body: bytes) -> Body:
        # Parsing is native code: sixteen bytes cost about what a character costs elsewhere.
        return await self._tokenizer.run(len(body) // 16, lambda: parse_body(model, body))

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise ModelNotFoundError(
                f"The model {name[:200]!r} is not served here; {self.model_name!r} is.", "model"
            )

    async def _rank_info(self) -> RankInfo:
        if self._info is None:
            self._info = await self._supervisors.info(self.serving.rank_wait_s)
        return self._info

    def _close(self, stream: BatchStream) -> None:
        self._open_requests -= 1
        stream.cancel()


async def _first_batch(stream: BatchStream) -> Batch:
    try:
        batch = await anext(stream)
    except StopAsyncIteration as end:
        raise EngineUnavailableError("The model's replica gave no answer.") from end
    if isinstance(batch[0], Failure):
        raise exception_of(batch[0])
    return batch


async def _events(answer: Answer, first: Batch, rest: BatchStream) -> AsyncIterator[bytes]:
    """Server-sent events of a started stream; a failure is one error event before the end mark."""
    batch: Batch | None = first
    try:
        while batch is not None:
            for delta in batch:
                if isinstance(delta, Failure):
                    raise exception_of(delta)
            yield b"".join(answer.events(x) for x in batch if isinstance(x, TextDelta))
            batch = await anext(rest, None)
    # The status line is gone: whatever happens now must be said in the stream, and once.
    except Exception as error:
        if not isinstance(error, CoterieError):
            log.exception("A stream broke")
        yield event(envelope(error)[1]) + DONE
        return
    yield answer.last_events()
