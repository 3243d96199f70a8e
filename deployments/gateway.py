"""The gateway: checks a request, makes token ids of it, sends it on, writes the answer.

Nothing here imports torch or Ray; `supervisor_client` is the way to the model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from core.errors import CoterieError, RequestError
from core.request import Request
from deployments.access import Access
from deployments.admission import most_at_once
from deployments.answer_form import AnswerForm
from deployments.caller import NOBODY, Caller
from deployments.joined_streams import BatchStream, JoinedStreams
from deployments.limits_client import Limits, LimitsClient
from deployments.metered_supervisors import MeteredSupervisors, Supervisors
from deployments.metrics_page import metrics_page
from deployments.openai_errors import (
    ContextLengthError,
    ModelNotFoundError,
    envelope,
    exception_of,
)
from deployments.openai_logprobs import Json
from deployments.openai_messages import Message
from deployments.openai_schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from deployments.openai_stream import DONE, Answer, event
from deployments.output_formats import OutputFormats
from deployments.prompt_text import PromptText
from deployments.rank_channel import RankInfo
from deployments.sampling_fields import SamplingFields
from deployments.settings import ServingSettings
from deployments.structured_fields import structure_of
from deployments.text_delta import Batch, Failure, Generation, TextDelta
from deployments.tokenizer_worker import TokenizerWorker
from deployments.tool_use import OutputPlan, ToolUse
from engine.sampling_defaults import sampling_defaults

log = logging.getLogger("ray.serve")

_STATUS_TIMEOUT_S = 2.0
_LONG_BODY_BYTES = 64 * 1024
"""Prompts are held against the context before they are tokenised whole from here on."""


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
        limits: LimitsClient | None = None,
    ) -> None:
        """`idle_status` tells the model deployment's state where it may run zero replicas.

        `limits` are shared ones; left out, this gateway counts alone. Raises SettingsError.
        """
        self.model_name = model_name
        self.serving = serving
        self.access = Access(serving)
        self.limits = limits or LimitsClient(Limits(), "alone")
        self._supervisors = MeteredSupervisors(supervisors, serving.replicas)
        self._idle_status = idle_status
        self._tokenizer = TokenizerWorker.open(model_dir)
        self._formats = OutputFormats.open(model_dir, serving)
        self._defaults = sampling_defaults(model_dir)
        self._started = int(time.time())
        self._info: RankInfo | None = None
        self._open_requests = 0

    async def chat(self, body: bytes, caller: Caller = NOBODY) -> Json | EventStream:
        """POST /v1/chat/completions. Raises CoterieError."""
        asked = await self._parse(ChatRequest, body)
        self._check(asked)
        tools = ToolUse.of(asked, self._formats)
        prompt = await self._tokenizer.chat(
            await self._turns(asked.messages, body),
            asked.chat_template_kwargs or {},
            tools.template_kwargs,
            await self._context_tokens(body),
        )
        plan = tools.plan(prompt.ids, structure_of(asked))
        return await self._answer(asked, (prompt,), plan, caller)

    async def completion(self, body: bytes, caller: Caller = NOBODY) -> Json | EventStream:
        """POST /v1/completions. Raises CoterieError."""
        asked = await self._parse(CompletionRequest, body)
        self._check(asked)
        asked.check_prompts(self.serving)
        add_special, echo = asked.add_special_tokens is not False, bool(asked.echo)
        context_tokens = await self._context_tokens(body)
        prompts = []
        for prompt in asked.prompt:
            prompts.append(await self._tokenizer.prompt(prompt, add_special, echo, context_tokens))
            await asyncio.sleep(0)  # many short ones are as long as a long one
        return await self._answer(
            asked, tuple(prompts), OutputPlan(structure_of(asked), None, ()), caller
        )

    async def tokenize(self, body: bytes) -> Json:
        """POST /tokenize, in vLLM's shape. Raises CoterieError."""
        asked = await self._parse(TokenizeRequest, body)
        self._check_model(asked.model or self.model_name)
        asked.check()
        most = await self._context_tokens(body)
        if asked.messages is not None:
            turns = await self._turns(asked.messages, body)
            kwargs = asked.chat_template_kwargs or {}
            prompt = await self._tokenizer.chat(turns, kwargs, context_tokens=most)
        else:
            add_special = asked.add_special_tokens is not False
            text = asked.prompt or ""
            prompt = await self._tokenizer.prompt(text, add_special, context_tokens=most)
        ids = prompt.ids
        info = await self._rank_info()
        if prompt.is_beginning:
            raise ContextLengthError(
                f"The prompt has over {len(ids)} tokens; the limit for a prompt and its answer "
                f"together is {info.context_tokens} tokens.",
                "prompt" if asked.messages is None else "messages",
            )
        names = await self._tokenizer.token_texts(ids) if asked.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": info.context_tokens,
            "tokens": ids,
            "token_strs": names,
        }

    async def detokenize(self, body: bytes) -> Json:
        """POST /detokenize, in vLLM's shape. Raises CoterieError."""
        asked = await self._parse(DetokenizeRequest, body)
        self._check_model(asked.model or self.model_name)
        return {"prompt": await self._tokenizer.text(tuple(asked.tokens))}

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

    async def metrics(self) -> bytes:
        """GET /metrics: what the running replicas count, in Prometheus' text format."""
        statuses = await self._supervisors.statuses(_STATUS_TIMEOUT_S)
        return metrics_page(self.model_name, statuses)

    def status(self) -> dict[str, float]:
        """Plain numbers about this process."""
        return {
            "pid": os.getpid(),
            "torch_imported": int("torch" in sys.modules),
            "open_requests": self._open_requests,
        }

    def _check(self, asked: SamplingFields) -> None:
        """What needs no token ids. Raises RequestError."""
        self._check_model(asked.model)
        asked.check_stream()
        asked.stop_strings(self.serving)
        asked.answers(self.serving)

    async def _answer(
        self,
        asked: SamplingFields,
        prompts: tuple[PromptText, ...],
        plan: OutputPlan,
        caller: Caller,
    ) -> Json | EventStream:
        chat = isinstance(asked, ChatRequest)
        stream = bool(asked.stream)
        made = asked.answers(self.serving)
        asked.check_scores(sum(len(prompt.ids) for prompt in prompts), self.serving)
        form = AnswerForm(
            chat=chat,
            request_id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            model=self.model_name,
            prompts=prompts,
            made=made,
            given=asked.choices(self.serving),
            logprobs=asked.logprobs_count() is not None,
            prompt_logprobs=asked.prompt_logprobs is not None,
            echo=isinstance(asked, CompletionRequest) and bool(asked.echo),
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
            parser=plan.new_parser,
            stops=bool(asked.stop),
        )
        requests = await self._requests(asked, form, plan, caller)
        stop = asked.stop_strings(self.serving)
        generations = [
            Generation(request=request, stop=stop, stream=stream, special_text=plan.special_text)
            for request in requests
        ]
        batches = JoinedStreams(self._start_all(generations), made)
        answer = Answer(form)
        self._open_requests += 1
        try:
            # The first batch decides the HTTP status: a refusal is no stream.
            first = await _checked(batches.first())
            if not stream:
                deltas = await _all_deltas(first, batches, len(prompts))
                size = sum(delta.size for delta in deltas)
                body = await self._tokenizer.run(size, lambda: answer.body(deltas))
        except BaseException:
            self._close(batches)
            raise
        if not stream:
            self._close(batches)
            return body
        open_streams = [batches]

        def cancel() -> None:
            if open_streams:
                self._close(open_streams.pop())

        return EventStream(self._events(answer, first, batches), cancel)

    def _start_all(self, generations: list[Generation]) -> list[BatchStream]:
        """All of them or none."""
        streams: list[BatchStream] = []
        try:
            for generation in generations:
                streams.append(self._supervisors.generate(generation))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return streams

    async def _events(
        self, answer: Answer, first: Batch, rest: JoinedStreams
    ) -> AsyncIterator[bytes]:
        """Server-sent events of a started stream; a failure is one event before the end mark."""
        batch: Batch | None = first
        try:
            while batch is not None:
                deltas = [delta for delta in batch if isinstance(delta, TextDelta)]
                failures = [delta for delta in batch if isinstance(delta, Failure)]
                if failures:
                    raise exception_of(failures[0])
                size = sum(delta.size for delta in deltas)
                yield await self._tokenizer.run(size, partial(answer.all_events, deltas))
                batch = await anext(rest, None)
        # The status line is gone: whatever happens now must be said in the stream, and once.
        except Exception as error:
            if not isinstance(error, CoterieError):
                log.exception("A stream broke")
            yield event(envelope(error)[1]) + DONE
            return
        yield answer.last_events()

    async def _requests(
        self, asked: SamplingFields, form: AnswerForm, plan: OutputPlan, caller: Caller
    ) -> list[Request]:
        """One request to the engine for each prompt. Raises RequestError."""
        param = "messages" if form.chat else "prompt"
        info = await self._rank_info()
        most = most_at_once(self.serving, info.max_sequences, form.made, asked.priority)
        if len(form.prompts) > most:
            raise RequestError(
                f"expected at most {most} prompts, as the queue has room for no more at once, "
                f"found {len(form.prompts)}. Send them in several requests.",
                param,
            )
        now_s = time.time()
        requests = []
        for number, prompt in enumerate(form.prompts):
            if not prompt.ids:
                raise RequestError("The prompt has no tokens.", param)
            if prompt.is_beginning:
                raise ContextLengthError(
                    f"The prompt has over {len(prompt.ids)} tokens and {asked.limit_param} is "
                    f"{asked.token_limit() or 'left out'}; the limit for both together is "
                    f"{info.context_tokens} tokens.",
                    param,
                )
            if max(prompt.ids) >= info.vocab_size:
                raise RequestError(
                    f"expected token ids from 0 to {info.vocab_size - 1}, found {max(prompt.ids)}.",
                    param,
                )
            try:
                params = asked.sampling(
                    len(prompt.ids),
                    info.context_tokens,
                    info.vocab_size,
                    self._defaults,
                    self.serving.default_max_tokens,
                    plan.structure,
                )
            except ContextLengthError as error:
                raise ContextLengthError(str(error), error.param or param) from error
            suffix = f"-{number}" if number else ""
            requests.append(
                Request(
                    request_id=form.request_id + suffix,
                    prompt_ids=prompt.ids,
                    params=params,
                    n=form.made,
                    tenant=caller.tenant,
                    arrival_s=now_s,
                    priority=asked.priority,
                    deadline_s=caller.deadline_s,
                )
            )
        return requests

    async def _parse(self, model: type[Body], body: bytes) -> Body:
        # Parsing is native code: sixteen bytes cost about what a character costs elsewhere.
        return await self._tokenizer.run(len(body) // 16, lambda: parse_body(model, body))

    async def _turns(self, messages: list[Message], body: bytes) -> list[Json]:
        """The messages as templates read them; calls of tools in them are parsed once more."""
        return await self._tokenizer.run(
            len(body) // 16, lambda: self._formats.template_messages(messages)
        )

    async def _context_tokens(self, body: bytes) -> int | None:
        """The limit for prompt and answer; None for a body too short to matter."""
        return (await self._rank_info()).context_tokens if len(body) > _LONG_BODY_BYTES else None

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise ModelNotFoundError(
                f"The model {name[:200]!r} is not served here; {self.model_name!r} is.", "model"
            )

    async def _rank_info(self) -> RankInfo:
        if self._info is None:
            self._info = await self._supervisors.info(self.serving.rank_wait_s)
        return self._info

    def _close(self, batches: JoinedStreams) -> None:
        self._open_requests -= 1
        batches.cancel()


async def _checked(coming: Awaitable[Batch]) -> Batch:
    """A batch; a failure that no text comes before is raised."""
    batch = await coming
    if isinstance(batch[0], Failure):
        raise exception_of(batch[0])
    return batch


async def _all_deltas(first: Batch, rest: JoinedStreams, prompts: int) -> list[TextDelta]:
    """The deltas of an unstreamed answer: one batch a prompt."""
    batches = [first, *[await _checked(rest.first()) for _ in range(prompts - 1)]]
    return [delta for batch in batches for delta in batch if isinstance(delta, TextDelta)]
