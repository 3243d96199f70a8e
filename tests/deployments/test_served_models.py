"""A gateway of several models and groups, over fake replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from core.errors import EngineUnavailableError, RequestError
from deployments.answering import EventStream
from deployments.caller import NOBODY, Caller
from deployments.dispatch_rules import DispatchRule, DispatchRules
from deployments.exchange import CURRENT, Exchange
from deployments.gateway import Gateway
from deployments.openai_errors import ModelNotFoundError
from deployments.rank_channel import RankInfo
from deployments.replica_group import ReplicaGroup
from deployments.request_labels import Labeller, Labels
from deployments.served_model import ServedModel
from deployments.served_models import ServedModels
from deployments.settings import ServingSettings
from deployments.text_delta import Batch, Generation, TextDelta
from deployments.text_threads import TextThreads
from tests.serving.tiny_model_folder import make_folder


class Replicas:
    """Supervisors of one group that answer with their name, until they are told to fail."""

    def __init__(self, name: str, context_tokens: int = 100) -> None:
        self.name = name
        self.fails = False
        self.asked: list[Generation] = []
        self.stream_class: type[Stream] = Stream
        self.status = {"ready": 1.0, "pid": float(len(name))}
        self._info = RankInfo(
            pid=1,
            model_type="x",
            vocab_size=267,
            context_tokens=context_tokens,
            max_sequences=4,
            eos_ids=(0,),
        )

    def generate(self, generation: Generation) -> Stream:
        self.asked.append(generation)
        return self.stream_class(self)

    async def info(self, timeout_s: float) -> RankInfo:
        return self._info

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        return [] if self.fails else [self.status]


class Stream:
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        if self._replicas.fails:
            raise EngineUnavailableError("gone")
        if self._ended:
            raise StopAsyncIteration
        self._ended = True
        return (TextDelta(index=0, text=self._replicas.name, finish_reason="stop"),)

    def cancel(self) -> None:
        pass


class FixedLabels(Labeller):
    """Every text is about its first word."""

    def __init__(self) -> None:
        pass

    async def all_labels(self, caller: Caller, user: str | None, texts: Any) -> tuple[Labels, ...]:
        return tuple(Labels(domain=(text or "").split(" ")[0], confidence=1.0) for text in texts)

    def status(self) -> dict[str, float]:
        return {}


RULES = [
    {"domain": "code", "to_model": "coder"},
    {"domain": "law", "to_group": "b", "model": "demo"},
]


class Service:
    """Models "demo" (groups "a", "b" and "c") and "coder"."""

    def __init__(self, folder: Path, rules: list[dict[str, Any]] = RULES) -> None:
        self.now_s = 0.0
        self.replicas = {name: Replicas(name) for name in ("a", "b", "c", "coder")}
        self.replicas["coder"] = Replicas("coder", context_tokens=50)
        serving, threads = ServingSettings(), TextThreads()

        def group(name: str, of: str) -> ReplicaGroup:
            own = serving.model_copy(update={"group": name})
            return ReplicaGroup(self.replicas[of], own, None, lambda: self.now_s)

        demo = [group(name, name) for name in ("a", "b", "c")]
        models = ServedModels(
            [
                ServedModel("demo", folder, serving, demo, threads),
                ServedModel("coder", folder, serving, [group("", "coder")], threads),
            ],
            DispatchRules(
                [DispatchRule.model_validate(rule) for rule in rules],
                {"demo": ("a", "b", "c"), "coder": ("",)},
            ),
        )
        self.gateway = Gateway(models, serving, threads, labeller=FixedLabels())

    async def ask(self, model: str, prompt: Any = "hello", **more: Any) -> dict[str, Any]:
        body = json.dumps({"model": model, "prompt": prompt, **more}).encode()
        answer = await self.gateway.completion(body, NOBODY)
        assert not isinstance(answer, EventStream)
        return answer

    async def place(self, model: str, prompt: str = "hello") -> tuple[str, str]:
        """(model, group) that answered."""
        answer = await self.ask(model, prompt)
        return answer["model"], answer["choices"][0]["text"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("several"))


@pytest.fixture
def service(folder: Path) -> Service:
    return Service(folder)


def test_each_name_is_answered_by_its_own_model(service: Service) -> None:
    async def run() -> None:
        assert (await service.place("coder")) == ("coder", "coder")
        assert (await service.place("demo"))[0] == "demo"
        with pytest.raises(ModelNotFoundError, match="these are: 'demo', 'coder', 'auto'"):
            await service.ask("codr")

    asyncio.run(run())


def test_auto_asks_the_rules_and_a_named_model_does_not(service: Service) -> None:
    async def run() -> None:
        assert (await service.place("auto", "code it")) == ("coder", "coder")
        assert (await service.place("auto", "law it")) == ("demo", "b")
        assert (await service.place("auto", "what is it"))[0] == "demo"
        assert (await service.place("demo", "code it"))[0] == "demo"
        assert (await service.place("coder", "law it")) == ("coder", "coder")

    asyncio.run(run())


def test_a_bound_group_serves_its_domain_alone_and_all_of_it(service: Service) -> None:
    async def run() -> None:
        bound = {await service.place("demo", "law it") for _ in range(4)}
        others = {await service.place("demo", "cook it") for _ in range(4)}
        assert bound == {("demo", "b")}
        assert "b" not in {group for _, group in others}
        service.replicas["b"].fails = True
        with pytest.raises(EngineUnavailableError):
            await service.place("demo", "law it")

    asyncio.run(run())


def test_among_open_groups_the_less_loaded_one_is_taken(service: Service) -> None:
    async def run() -> None:
        body = b'{"model": "demo", "prompt": "cook it", "stream": true}'
        streams = [await service.gateway.completion(body, NOBODY) for _ in range(4)]
        assert len(service.replicas["a"].asked) == len(service.replicas["c"].asked) == 2
        for stream in streams:
            assert isinstance(stream, EventStream)
            stream.cancel()
            stream.cancel()
        groups = service.gateway.models_served.named("demo").groups
        assert [group.load.prompts for group in groups.values()] == [0, 0, 0]

    asyncio.run(run())


def test_requests_that_come_together_are_spread_before_any_is_answered(service: Service) -> None:
    async def run() -> None:
        await asyncio.gather(*(service.ask("demo", ["a", "b"]) for _ in range(10)))
        assert len(service.replicas["a"].asked) == len(service.replicas["c"].asked) == 10

    asyncio.run(run())


def test_long_first_answers_do_not_keep_a_group_from_its_share(service: Service) -> None:
    async def run() -> None:
        may_end = asyncio.Event()

        class Long(Stream):
            async def __anext__(self) -> Batch:
                await may_end.wait()
                return await super().__anext__()

        for replicas in service.replicas.values():
            replicas.stream_class = Long
        calls = []
        for number in range(1, 11):
            calls.append(asyncio.create_task(service.ask("demo")))
            while sum(len(replicas.asked) for replicas in service.replicas.values()) < number:
                await asyncio.sleep(0)
        assert len(service.replicas["a"].asked) == len(service.replicas["c"].asked) == 5
        may_end.set()
        await asyncio.gather(*calls)

    asyncio.run(run())


def test_what_fails_before_it_is_sent_is_under_way_no_more(service: Service) -> None:
    async def run() -> None:
        groups = service.gateway.models_served.named("demo").groups
        with pytest.raises(RequestError):
            await service.ask("demo", "a" * 3000)
        call = asyncio.create_task(service.ask("demo"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [group.load.prompts for group in groups.values()] == [0, 0, 0]

    asyncio.run(run())


def test_one_request_alone_waits_for_a_group_that_does_not_answer(service: Service) -> None:
    async def run() -> None:
        loading = asyncio.Event()

        async def info(timeout_s: float) -> RankInfo:
            await loading.wait()
            raise EngineUnavailableError("still loading")

        service.replicas["a"].info = info  # type: ignore[method-assign]
        first = asyncio.create_task(service.place("demo"))
        for seconds in (0.0, 6.0):
            await asyncio.sleep(0)
            service.now_s += seconds
            assert {await service.place("demo") for _ in range(5)} == {("demo", "c")}
        loading.set()
        with pytest.raises(EngineUnavailableError):
            await first

    asyncio.run(run())


def test_a_group_whose_streams_break_is_left_alone_like_one_that_fails(service: Service) -> None:
    async def run() -> None:
        body = b'{"model": "demo", "prompt": "cook it", "stream": true}'
        stream = await service.gateway.completion(body, NOBODY)
        assert isinstance(stream, EventStream)
        service.replicas["a"].fails = True
        assert b"error" in [event async for event in stream.events][-1]
        stream.cancel()
        assert {await service.place("demo") for _ in range(3)} == {("demo", "c")}

    asyncio.run(run())


def test_a_group_that_fails_is_left_alone_for_a_while(service: Service) -> None:
    async def run() -> None:
        service.replicas["a"].fails = True
        with pytest.raises(EngineUnavailableError):
            await service.place("demo")
        assert {await service.place("demo") for _ in range(3)} == {("demo", "c")}
        service.replicas["a"].fails = False
        service.now_s = 60.0
        assert (await service.place("demo")) == ("demo", "a")

    asyncio.run(run())


def test_limits_are_those_of_the_model_that_answers(service: Service) -> None:
    async def run() -> None:
        prompt = [65] * 60
        await service.ask("demo", max_tokens=10, prompt=prompt)
        with pytest.raises(RequestError, match="50 tokens"):
            await service.ask("coder", max_tokens=10, prompt=prompt)

    asyncio.run(run())


def test_all_names_are_listed_and_each_can_be_looked_up(service: Service) -> None:
    listed = [card["id"] for card in service.gateway.models()["data"]]
    assert listed == ["demo", "coder", "auto"]
    for name in listed:
        assert service.gateway.model(name)["id"] == name
    with pytest.raises(ModelNotFoundError):
        service.gateway.model("other")


def test_tokenize_is_by_model_and_without_one_the_first(service: Service) -> None:
    async def run() -> None:
        first = await service.gateway.tokenize(b'{"prompt": "abc"}')
        named = await service.gateway.tokenize(b'{"prompt": "abc", "model": "coder"}')
        assert (first["max_model_len"], named["max_model_len"]) == (100, 50)
        tokens = json.dumps({"tokens": named["tokens"], "model": "coder"}).encode()
        assert await service.gateway.detokenize(tokens) == {"prompt": "abc"}
        with pytest.raises(ModelNotFoundError, match="'' is not served"):
            await service.gateway.tokenize(b'{"prompt": "abc", "model": ""}')
        with pytest.raises(RequestError, match=r"depends on a request's text.*'demo', 'coder'"):
            await service.gateway.tokenize(b'{"prompt": "abc", "model": "auto"}')

    asyncio.run(run())


def test_ready_tells_of_each_model_and_group(service: Service) -> None:
    async def run() -> None:
        ready, details = await service.gateway.ready()
        assert ready and details["ready_replicas"] == 4
        service.replicas["b"].fails = True
        ready, details = await service.gateway.ready()
        assert not ready and not details["models"]["demo"]["ready"]
        assert not details["models"]["demo"]["groups"]["b"]["ready"]
        assert details["models"]["coder"] == {"ready": True, "replicas": 1, "ready_replicas": 1}

    asyncio.run(run())


def test_metrics_are_one_page_with_model_and_group(service: Service) -> None:
    page = asyncio.run(service.gateway.metrics())
    assert page.count(b"# TYPE coterie_steps_total counter") == 1
    assert b'coterie_ready{group="b",model_name="demo",replica="1"} 1.0' in page
    assert b'coterie_ready{group="",model_name="coder",replica="5"} 1.0' in page


def test_the_request_log_names_the_model_that_answered(service: Service) -> None:
    async def run() -> dict[str, Any]:
        exchange = Exchange("POST", "/v1/completions", None)
        token = CURRENT.set(exchange)
        await service.ask("auto", "law it")
        CURRENT.reset(token)
        return exchange.record()

    record = asyncio.run(run())
    assert (record["model"], record["group"]) == ("demo", "b")
