from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from core.errors import EngineUnavailableError, OverloadedError
from core.request import Request, SamplingParams
from deployments.exchange import CURRENT, Exchange
from deployments.joined_streams import BatchStream
from deployments.limits_client import Limits, LimitsClient
from deployments.metered_supervisors import MeteredSupervisors
from deployments.openai_errors import TenantLimitError
from deployments.rank_channel import RankInfo
from deployments.tenant_limits import Allowance, Refusal
from deployments.text_delta import Batch, Failure, Generation, TextDelta

FULL = (Failure.of(OverloadedError("full", 3.0)),)
DONE = (
    TextDelta(index=0, text="a", finish_reason="stop", completion_tokens=2),
    TextDelta(index=1, text="b", finish_reason="length", completion_tokens=3),
)
GENERATION = Generation(
    request=Request(request_id="r", prompt_ids=(1, 2), params=SamplingParams(max_tokens=3), n=2)
)


class Replicas:
    """Each call meets the next replica's batches."""

    def __init__(self, *answers: tuple[Batch, ...]) -> None:
        self.answers = list(answers)
        self.calls = 0

    def generate(self, generation: Generation) -> Answer:
        self.calls += 1
        return Answer(list(self.answers.pop(0)))

    async def info(self, timeout_s: float) -> RankInfo:
        raise NotImplementedError

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        return []


class Answer:
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        if not self.batches:
            raise StopAsyncIteration
        return self.batches.pop(0)

    def cancel(self) -> None:
        self.batches.clear()


def ask(replicas: Replicas, count: int, exchange: Exchange) -> list[Batch]:
    async def run() -> list[Batch]:
        CURRENT.set(exchange)
        stream = MeteredSupervisors(replicas, count).generate(GENERATION)
        return [batch async for batch in stream]

    return asyncio.run(run())


def test_a_full_replica_is_no_refusal_while_another_has_room() -> None:
    exchange = Exchange("POST", "/", None)
    assert ask(Replicas((FULL,), (DONE,)), 2, exchange) == [DONE]
    assert exchange.error is None and exchange.completion_tokens == 5
    replicas = Replicas((FULL,), (FULL,), (FULL,), (FULL,))
    assert ask(replicas, 9, exchange) == [FULL] and replicas.calls == 3
    assert exchange.error == "overloaded"
    assert ask(Replicas((FULL,)), 1, exchange) == [FULL]


def test_a_prompt_is_charged_before_it_is_sent_and_the_answer_as_it_comes() -> None:
    async def run() -> None:
        client = LimitsClient(Limits(), "g")
        allowance = Allowance(tokens_per_minute=8)
        exchange = Exchange("POST", "/", None)
        exchange.lease = await client.lease("a", allowance)
        CURRENT.set(exchange)
        replicas = Replicas((DONE,))
        assert [batch async for batch in MeteredSupervisors(replicas).generate(GENERATION)]
        assert (await client.counts())["a"] == {"requests": 1, "tokens": 7, "at_once": 0}
        exchange.lease = await client.lease("a", allowance)
        refused = MeteredSupervisors(replicas).generate(GENERATION)
        with pytest.raises(TenantLimitError):
            await anext(refused)
        assert replicas.calls == 1, "a prompt over the limit never reaches a replica"

    asyncio.run(run())


def test_a_stream_given_up_while_its_prompt_is_charged_is_never_started() -> None:
    class Waiting(Limits):
        async def charge(self, tenant: str, tokens: int, allowance: Allowance) -> Refusal | None:
            stream.cancel()
            return await super().charge(tenant, tokens, allowance)

    stream: BatchStream
    replicas = Replicas((DONE,))
    exchange = Exchange("POST", "/", None)

    async def run() -> None:
        nonlocal stream
        client = LimitsClient(Waiting(), "g")
        exchange.lease = await client.lease("a", Allowance(tokens_per_minute=8))
        CURRENT.set(exchange)
        stream = MeteredSupervisors(replicas).generate(GENERATION)
        assert [batch async for batch in stream] == []
        assert [batch async for batch in stream] == []
        assert (await client.counts())["a"]["at_once"] == 0

    asyncio.run(run())
    assert replicas.calls == 0 and exchange.open_streams == 0


def test_a_refused_charge_is_the_error_of_its_exchange() -> None:
    class Away(Limits):
        async def charge(self, tenant: str, tokens: int, allowance: Allowance) -> Refusal | None:
            raise EngineUnavailableError("away")

    async def run() -> None:
        client = LimitsClient(Away(), "g")
        exchange = Exchange("POST", "/", None)
        exchange.lease = await client.lease("a", Allowance(tokens_per_minute=8))
        CURRENT.set(exchange)
        with pytest.raises(EngineUnavailableError):
            await anext(MeteredSupervisors(Replicas((DONE,))).generate(GENERATION))
        assert exchange.error == "engine_unavailable"

    asyncio.run(run())
