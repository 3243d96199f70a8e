from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.build import build
from app.settings import Settings
from core.errors import EngineUnavailableError, OverloadedError
from deployments.answering import EventStream
from deployments.gateway import Gateway
from deployments.rank_channel import RankInfo
from deployments.replica_group import ReplicaGroup
from deployments.served_model import ServedModel
from deployments.served_models import ServedModels
from deployments.settings import ServingSettings
from deployments.shared_limits import SharedLimits
from deployments.supervisor_client import SupervisorClient, translated
from deployments.text_delta import Batch, Generation, TextDelta
from deployments.text_threads import TextThreads
from tests.serving.tiny_model_folder import make_folder

INFO = RankInfo(
    pid=1, model_type="x", vocab_size=267, context_tokens=100, max_sequences=4, eos_ids=(0,)
)
HELLO = TextDelta(index=0, text="Hello")


class Replica:
    """Supervisors that give prepared batches; an exception among them is raised."""

    def __init__(self, *batches: Batch | Exception, statuses: int = 1) -> None:
        self.batches = list(batches)
        self.cancelled = 0
        self.ready = [{"ready": 1.0}] * statuses

    def generate(self, generation: Generation) -> Replica:
        return self

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        if not self.batches:
            raise StopAsyncIteration
        batch = self.batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def cancel(self) -> None:
        self.cancelled += 1

    async def info(self, timeout_s: float) -> RankInfo:
        return INFO

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        return self.ready


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("g"))


def gateway(folder: Path, replica: Replica, state: str | None = None) -> Gateway:
    async def idle_status() -> str:
        return str(state)

    serving = ServingSettings(min_replicas=0 if state else None)
    threads = TextThreads()
    group = ReplicaGroup(replica, serving, idle_status if state else None)
    model = ServedModel("tiny", folder, serving, [group], threads)
    return Gateway(ServedModels([model]), serving, threads)


BODY = b'{"model": "tiny", "prompt": "a", "stream": %s}'


def test_a_replica_that_dies_mid_stream_ends_it_with_an_error_frame(folder: Path) -> None:
    replica = Replica((HELLO,), EngineUnavailableError("gone"))

    async def run() -> list[bytes]:
        stream = await gateway(folder, replica).completion(BODY % b"true")
        assert isinstance(stream, EventStream)
        return [data async for data in stream.events]

    data = asyncio.run(run())
    assert len(data) == 2 and b'"error"' in data[1] and data[1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("flag", [b"true", b"false"])
def test_a_replica_that_dies_before_the_first_text_is_a_503(folder: Path, flag: bytes) -> None:
    replica = Replica(EngineUnavailableError("gone"))
    with pytest.raises(EngineUnavailableError):
        asyncio.run(gateway(folder, replica).completion(BODY % flag))
    assert replica.cancelled == 1


def test_a_cancelled_call_frees_the_place(folder: Path) -> None:
    class Slow(Replica):
        async def __anext__(self) -> Batch:
            await asyncio.sleep(60)
            raise StopAsyncIteration

    replica = Slow()
    front = gateway(folder, replica)

    async def run() -> None:
        call = asyncio.create_task(front.completion(BODY % b"false"))
        await asyncio.sleep(0.05)
        assert front.status()["open_requests"] == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
    assert replica.cancelled == 1 and front.status()["open_requests"] == 0


@pytest.mark.parametrize(
    ("state", "statuses", "ready"),
    [
        (None, 1, True),
        (None, 0, False),
        ("idle", 0, True),
        ("running", 1, True),
        ("running", 0, False),
        ("DEPLOY_FAILED", 0, False),
    ],
)
def test_ready_means_served_now_or_startable(
    folder: Path, state: str | None, statuses: int, ready: bool
) -> None:
    front = gateway(folder, Replica(statuses=statuses), state)
    assert asyncio.run(front.ready())[0] is ready


def test_errors_of_serve_and_ray_become_ours() -> None:
    assert isinstance(translated(BackPressureError(1, 2)), OverloadedError)
    foreign: list[Exception] = [
        ActorDiedError(),
        ActorUnavailableError("x", b"0" * 16),
        DeploymentUnavailableError("x"),
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()),
    ]
    assert all(isinstance(translated(error), EngineUnavailableError) for error in foreign)
    assert isinstance(translated(KeyError("ours")), KeyError)


def test_serve_can_call_the_builder_with_yaml(tmp_path: Path) -> None:
    # Serve makes the settings from YAML only if it sees their class here.
    (parameter,) = inspect.signature(build).parameters.values()
    assert parameter.annotation is Settings
    assert Settings(model="org/name").model_name() == "org/name"
    folder = tmp_path / "my_model"
    folder.mkdir()
    assert Settings(model=str(folder)).model_name() == "my_model"


def test_of_several_prompts_all_are_started_or_none(folder: Path) -> None:
    class Second(Replica):
        calls = 0

        def generate(self, generation: Generation) -> Replica:
            self.calls += 1
            if self.calls == 2:
                raise EngineUnavailableError("gone")
            return self

    replica = Second((HELLO,))
    front = gateway(folder, replica)
    with pytest.raises(EngineUnavailableError):
        asyncio.run(front.completion(b'{"model": "tiny", "prompt": ["a", "b"]}'))
    assert replica.cancelled == 1 and front.status()["open_requests"] == 0


class Handle:
    """A Serve handle whose calls raise at once, or when their answer is awaited."""

    def __init__(self, error: Exception, at_once: bool) -> None:
        self.error = error
        self.at_once = at_once

    def options(self, **_: object) -> Handle:
        return self

    def remote(self, *_: object) -> Awaitable[object]:
        if self.at_once:
            raise self.error
        return self.answer()

    async def answer(self) -> object:
        raise self.error


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "error",
    [grpc.RpcError(), DeploymentUnavailableError("d"), BackPressureError(1, 1), TimeoutError()],
)
def test_limits_that_cannot_be_asked_and_a_model_that_is_away_are_unavailable(
    error: Exception, at_once: bool
) -> None:
    handle: Any = Handle(error, at_once)
    with pytest.raises(EngineUnavailableError, match="limits cannot be checked"):
        asyncio.run(SharedLimits(handle).counts())
    if not isinstance(error, TimeoutError):
        with pytest.raises((EngineUnavailableError, OverloadedError)):
            asyncio.run(SupervisorClient(handle).info(1.0))
