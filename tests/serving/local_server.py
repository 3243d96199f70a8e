"""Gateway, supervisor and rank in this process, over real HTTP, without Ray.

Everything but Ray's parts is the product's own: the rank runs in a thread instead of an actor.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import uvicorn

from deployments.gateway import Gateway
from deployments.http_api import make_http_api
from deployments.rank_actor import RankActor
from deployments.rank_channel import RankInfo
from deployments.rank_process import RankProcess
from deployments.replica_group import ReplicaGroup
from deployments.served_model import ServedModel
from deployments.served_models import ServedModels
from deployments.settings import ServingSettings
from deployments.supervisor import Supervisor
from deployments.text_delta import Batch, Generation, decode_batch
from deployments.text_threads import TextThreads

MODEL = "tiny"
Result = TypeVar("Result")


class ThreadRank(RankProcess):
    """The rank in a thread; everything after the start is the product's."""

    def _start_actor(self, path: str) -> asyncio.Task[str]:
        args = (path, self._factory, self._settings)
        threading.Thread(target=RankActor().run, args=args, daemon=True).start()
        return asyncio.create_task(asyncio.sleep(3600, "never"))


class ThreadSupervisor(Supervisor):
    rank_class = ThreadRank


class LocalStream:
    def __init__(self, batches: AsyncIterator[bytes]) -> None:
        self._queue: asyncio.Queue[Batch | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._pump(batches))

    async def _pump(self, batches: AsyncIterator[bytes]) -> None:
        try:
            async for data in batches:
                self._queue.put_nowait(decode_batch(data))
        finally:
            await batches.aclose()
            self._queue.put_nowait(None)

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> Batch:
        batch = await self._queue.get()
        if batch is None:
            raise StopAsyncIteration
        return batch

    def cancel(self) -> None:
        self._task.cancel()


class LocalSupervisors:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def generate(self, generation: Generation) -> LocalStream:
        return LocalStream(self._supervisor.generate(msgspec.msgpack.encode(generation)))

    async def info(self, timeout_s: float) -> RankInfo:
        return msgspec.msgpack.decode(await self._supervisor.info(), type=RankInfo)

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        return [await self._supervisor.status()]


class LocalServer:
    def __init__(
        self,
        model_dir: Path,
        serving: ServingSettings,
        engine: dict[str, Any],
        factory: str = "tests.serving.fake_engines:open_engine",
        pool: dict[str, Any] | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._serving = serving
        self._settings = {"model": str(model_dir), "engine": engine, "pool": pool}
        self._factory = factory
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self.url = ""

    def __enter__(self) -> LocalServer:
        self._thread.start()
        assert self._ready.wait(30)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def status(self) -> dict[str, float]:
        return self.call(self.supervisor.status())

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self._start()
        except BaseException as error:
            self._failure = error
            self._ready.set()
            return
        await self._server.main_loop()
        for task in self.supervisor._tasks:
            task.cancel()
        if self.supervisor._rank is not None:
            await self.supervisor._rank.close()

    async def _start(self) -> None:
        self.supervisor = ThreadSupervisor.__new__(ThreadSupervisor)
        await self.supervisor.__init__(  # type: ignore[misc]
            str(self._model_dir), self._serving, self._factory, self._settings
        )
        supervisors = LocalSupervisors(self.supervisor)
        threads = TextThreads()
        group = ReplicaGroup(supervisors, self._serving)
        self.model = ServedModel(MODEL, self._model_dir, self._serving, [group], threads)
        self.gateway = Gateway(ServedModels([self.model]), self._serving, threads)
        config = uvicorn.Config(
            make_http_api(self.gateway), port=0, log_level="error", lifespan="off"
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup()
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
