"""The gateway: checks a request, makes token ids of it, sends it on, writes the answer.

Nothing here imports torch or Ray; replica groups are the way to the models.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid

from deployments.access import Access
from deployments.answer_form import AnswerForm
from deployments.answering import Answering, EventStream
from deployments.caller import NOBODY, Caller
from deployments.dispatch_counts import dispatch_page, dispatch_status
from deployments.engine_requests import engine_requests
from deployments.exchange import CURRENT
from deployments.limits_client import Limits, LimitsClient
from deployments.metrics_page import metrics_page
from deployments.openai_errors import ContextLengthError
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
from deployments.prompt_text import PromptText
from deployments.request_labels import NO_LABELS, Labeller, Labels, chat_text, main_domain
from deployments.sampling_fields import SamplingFields
from deployments.served_model import ServedModel
from deployments.served_models import Place, ServedModels
from deployments.settings import ServingSettings
from deployments.structured_fields import structure_of
from deployments.text_delta import Generation
from deployments.text_threads import TextThreads
from deployments.tool_use import OutputPlan, ToolUse


class Gateway:
    """Requests in, answers out; one instance a gateway process."""

    def __init__(
        self,
        models: ServedModels,
        serving: ServingSettings,
        threads: TextThreads,
        limits: LimitsClient | None = None,
        labeller: Labeller | None = None,
    ) -> None:
        """`limits` are shared ones; left out, this gateway counts alone. Raises SettingsError.

        `labeller` tells a request's domain and session; left out, nobody knows them.
        """
        self.models_served = models
        self.serving = serving
        self.access = Access(serving)
        self.limits = limits or LimitsClient(Limits(), "alone")
        self.labeller = labeller
        self._threads = threads
        self._answering = Answering(threads)

    async def chat(self, body: bytes, caller: Caller = NOBODY) -> Json | EventStream:
        """POST /v1/chat/completions. Raises CoterieError."""
        asked = await self._parse(ChatRequest, body)
        self._check(asked)
        labels = await self._labels(asked, caller, (chat_text(asked.messages),))
        with self._place(asked, labels) as place:
            tools = ToolUse.of(asked, place.model.formats)
            prompt = await place.model.tokenizer.chat(
                await self._turns(place.model, asked.messages, body),
                asked.chat_template_kwargs or {},
                tools.template_kwargs,
                await place.group.context_tokens(body),
            )
            plan = tools.plan(prompt.ids, structure_of(asked))
            return await self._answer(place, asked, (prompt,), plan, caller, labels)

    async def completion(self, body: bytes, caller: Caller = NOBODY) -> Json | EventStream:
        """POST /v1/completions. Raises CoterieError."""
        asked = await self._parse(CompletionRequest, body)
        self._check(asked)
        asked.check_prompts(self.serving)
        texts = tuple(prompt if isinstance(prompt, str) else None for prompt in asked.prompt)
        labels = await self._labels(asked, caller, texts)
        with self._place(asked, labels) as place:
            add_special, echo = asked.add_special_tokens is not False, bool(asked.echo)
            context_tokens = await place.group.context_tokens(body)
            tokenizer = place.model.tokenizer
            prompts = []
            for prompt in asked.prompt:
                prompts.append(await tokenizer.prompt(prompt, add_special, echo, context_tokens))
                await asyncio.sleep(0)  # many short ones are as long as a long one
            plan = OutputPlan(structure_of(asked), None, ())
            return await self._answer(place, asked, tuple(prompts), plan, caller, labels)

    async def tokenize(self, body: bytes) -> Json:
        """POST /tokenize, in vLLM's shape. Raises CoterieError."""
        asked = await self._parse(TokenizeRequest, body)
        model = self.models_served.named(asked.model)
        asked.check()
        group = model.any_group
        most = await group.context_tokens(body)
        if asked.messages is not None:
            turns = await self._turns(model, asked.messages, body)
            kwargs = asked.chat_template_kwargs or {}
            prompt = await model.tokenizer.chat(turns, kwargs, context_tokens=most)
        else:
            add_special = asked.add_special_tokens is not False
            text = asked.prompt or ""
            prompt = await model.tokenizer.prompt(text, add_special, context_tokens=most)
        ids = prompt.ids
        info = await group.info()
        if prompt.is_beginning:
            raise ContextLengthError(
                f"The prompt has over {len(ids)} tokens; the limit for a prompt and its answer "
                f"together is {info.context_tokens} tokens.",
                "prompt" if asked.messages is None else "messages",
            )
        names = await model.tokenizer.token_texts(ids) if asked.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": info.context_tokens,
            "tokens": ids,
            "token_strs": names,
        }

    async def detokenize(self, body: bytes) -> Json:
        """POST /detokenize, in vLLM's shape. Raises CoterieError."""
        asked = await self._parse(DetokenizeRequest, body)
        model = self.models_served.named(asked.model)
        return {"prompt": await model.tokenizer.text(tuple(asked.tokens))}

    def models(self) -> Json:
        """GET /v1/models."""
        return {"object": "list", "data": self.models_served.cards()}

    def model(self, name: str) -> Json:
        """GET /v1/models/{name}. Raises ModelNotFoundError."""
        return self.models_served.card(name)

    async def ready(self) -> tuple[bool, Json]:
        """GET /ready: whether each model has a replica that ran a real step, or may start one."""
        details = await self.models_served.ready()
        return bool(details["ready"]), details

    async def metrics(self) -> bytes:
        """GET /metrics, in Prometheus' text format: what the replicas and the dispatcher count."""
        return metrics_page(await self.models_served.replicas()) + dispatch_page()

    def status(self) -> dict[str, float]:
        """Plain numbers about this process."""
        return {
            "pid": os.getpid(),
            "torch_imported": int("torch" in sys.modules),
            "open_requests": self._answering.open_requests,
            **({} if self.labeller is None else self.labeller.status()),
            **dispatch_status(),
        }

    def _check(self, asked: SamplingFields) -> None:
        """What needs no token ids. Raises RequestError."""
        self.models_served.check(asked.model)
        asked.check_stream()
        asked.stop_strings(self.serving)
        asked.answers(self.serving)

    async def _labels(
        self, asked: SamplingFields, caller: Caller, texts: tuple[str | None, ...]
    ) -> tuple[Labels, ...]:
        """Those of each prompt; of token ids there is no text."""
        if self.labeller is None:
            return (NO_LABELS,) * len(texts)
        return await self.labeller.all_labels(caller, asked.user, texts)

    def _place(self, asked: ChatRequest | CompletionRequest, labels: tuple[Labels, ...]) -> Place:
        """The model and replicas that it goes to, decided before it is made token ids of."""
        place = self.models_served.place(asked.model, main_domain(labels), len(labels))
        exchange = CURRENT.get()
        if exchange is not None:
            exchange.model, exchange.group = place.model.name, place.group.name
        return place

    async def _answer(
        self,
        place: Place,
        asked: SamplingFields,
        prompts: tuple[PromptText, ...],
        plan: OutputPlan,
        caller: Caller,
        labels: tuple[Labels, ...],
    ) -> Json | EventStream:
        chat = isinstance(asked, ChatRequest)
        stream = bool(asked.stream)
        asked.check_scores(sum(len(prompt.ids) for prompt in prompts), self.serving)
        form = AnswerForm(
            chat=chat,
            request_id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            model=place.model.name,
            prompts=prompts,
            made=asked.answers(self.serving),
            given=asked.choices(self.serving),
            logprobs=asked.logprobs_count() is not None,
            prompt_logprobs=asked.prompt_logprobs is not None,
            echo=isinstance(asked, CompletionRequest) and bool(asked.echo),
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
            parser=plan.new_parser,
            stops=bool(asked.stop),
        )
        requests = await engine_requests(place, asked, form, plan, caller, labels)
        stop = asked.stop_strings(self.serving)
        generations = [
            Generation(
                request=request,
                stop=stop,
                stream=stream,
                special_text=plan.special_text,
                confidence=label.confidence,
            )
            for request, label in zip(requests, labels, strict=True)
        ]
        return await self._answering.answer(form, generations, place, stream)

    async def _parse(self, model: type[Body], body: bytes) -> Body:
        # Parsing is native code: sixteen bytes cost about what a character costs elsewhere.
        return await self._threads.run(len(body) // 16, lambda: parse_body(model, body))

    async def _turns(self, model: ServedModel, messages: list[Message], body: bytes) -> list[Json]:
        """The messages as templates read them; calls of tools in them are parsed once more."""
        return await self._threads.run(
            len(body) // 16, lambda: model.formats.template_messages(messages)
        )
