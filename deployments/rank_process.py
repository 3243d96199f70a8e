"""A supervisor's hold on one rank actor: started, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from core.errors import (
    BudgetError,
    CheckpointError,
    CoterieError,
    EngineUnavailableError,
    SettingsError,
)
from deployments.rank_actor import RankActor
from deployments.rank_channel import Down, Fatal, Heartbeat, Ready, Stop, Up, frame, read_messages
from deployments.settings import ServingSettings

_WATCH_S = 0.5
_MAX_SOCKET_PATH = 100
_START_ERRORS: dict[str, type[CoterieError]] = {
    kind.__name__: kind for kind in (BudgetError, CheckpointError, SettingsError)
}


class RankProcess:
    """One rank: a Ray actor on this node and the socket to it.

    `messages` ends when the rank does; `lost` then says why.
    """

    def __init__(
        self, serving: ServingSettings, engine_factory: str, settings: dict[str, Any]
    ) -> None:
        self._serving = serving
        self._factory = engine_factory
        self._settings = settings
        self._folder = ""
        self._actor: Any = None
        self._writer: asyncio.StreamWriter | None = None
        self._last_heard_s = 0.0
        self._tasks: list[asyncio.Task[Any]] = []
        self.lost: CoterieError | None = None

    async def start(self) -> Ready:
        """Start the actor and wait until its engine stands. Raises what kept it from that."""
        self._folder = tempfile.mkdtemp(prefix="coterie-rank-")
        path = os.path.join(self._folder, "socket")
        if len(path) > _MAX_SOCKET_PATH:  # the kernel's limit is 107 bytes
            shutil.rmtree(self._folder)
            self._folder = tempfile.mkdtemp(prefix="coterie-rank-", dir="/tmp")
            path = os.path.join(self._folder, "socket")
        connected: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        connected = asyncio.Queue()
        server = await asyncio.start_unix_server(
            lambda reader, writer: connected.put_nowait((reader, writer)), path, limit=1 << 20
        )
        try:
            ended = self._start_actor(path)
            arrival = asyncio.create_task(connected.get())
            await asyncio.wait(
                {arrival, ended},
                timeout=self._serving.rank_start_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not arrival.done():
                arrival.cancel()
                await self._raise_start_failure(ended)
            reader, self._writer = arrival.result()
        finally:
            server.close()
        self._messages = read_messages(reader)
        first = await asyncio.wait_for(self._first(), self._serving.rank_start_s)
        self._last_heard_s = asyncio.get_running_loop().time()
        self._tasks.append(asyncio.create_task(self._watch()))
        return first

    def send(self, message: Down) -> None:
        """Queue a message to the rank; to a lost one it goes nowhere."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def messages(self) -> AsyncIterator[Up]:
        """Everything the rank says, until it is lost."""
        clock = asyncio.get_running_loop().time
        try:
            async for message in self._messages:
                self._last_heard_s = clock()
                if isinstance(message, Fatal):
                    self._lose(f"the rank ended: {message.message}")
                elif isinstance(message, Heartbeat):
                    if message.step_age_s > self._serving.step_timeout_s:
                        self._lose(f"a step lasts {message.step_age_s:.0f} s: the rank hangs")
                else:
                    yield message
        except CoterieError as error:
            self._lose(str(error))
        if self.lost is None:
            self._lose("the rank process died")

    async def close(self) -> None:
        """End the rank, whatever state it is in."""
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
            self._actor = None
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """Tell the rank to end and remove its socket; for an end without an event loop."""
        self.send(Stop())
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start_actor(self, path: str) -> asyncio.Task[str]:
        device = str(self._settings.get("engine", {}).get("device", "cpu"))
        here = ray.get_runtime_context().get_node_id()
        self._actor = (
            ray.remote(RankActor)
            .options(
                num_cpus=self._serving.rank_cpus,
                num_gpus=1 if device.startswith("cuda") else 0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote()
        )
        running = self._actor.run.remote(path, self._factory, self._settings)
        task = asyncio.create_task(_ended(running))
        self._tasks.append(task)
        return task

    async def _raise_start_failure(self, ended: asyncio.Task[str]) -> None:
        if not ended.done():
            raise EngineUnavailableError(
                f"the rank did not start within {self._serving.rank_start_s:.0f} s; look for free "
                "CPUs and devices with `ray status`"
            )
        raise EngineUnavailableError(f"the rank ended before it was ready: {ended.result()}")

    async def _first(self) -> Ready:
        async for message in self._messages:
            if isinstance(message, Ready):
                return message
            if isinstance(message, Fatal):
                raise _START_ERRORS.get(message.error_type, EngineUnavailableError)(message.message)
        raise EngineUnavailableError("the rank died while it loaded its model")

    async def _watch(self) -> None:
        """Silence beyond the limit is death, even if the socket stays open."""
        clock = asyncio.get_running_loop().time
        while self.lost is None:
            await asyncio.sleep(_WATCH_S)
            silent_s = clock() - self._last_heard_s
            if silent_s > self._serving.heartbeat_timeout_s:
                self._lose(f"no heartbeat for {silent_s:.0f} s: the rank is dead or stopped")

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = EngineUnavailableError(f"{why}. It is being made again.")
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.transport.abort()


async def _ended(running: Any) -> str:
    # Why a rank ended is told over the socket; Ray knows more only if it never got that far.
    try:
        await running
    except ray.exceptions.RayError as error:
        return str(error)
    return "it was told to"
