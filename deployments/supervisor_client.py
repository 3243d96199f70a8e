"""The gateway's way to the supervisors: one streaming handle call a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)
from ray.serve.handle import DeploymentHandle

from core.errors import EngineUnavailableError, OverloadedError
from deployments.rank_channel import RankInfo
from deployments.routed_ask import encode_ask
from deployments.text_delta import Batch, Generation, decode_batch

_BACK_PRESSURE_RETRY_S = 2.0
_GRPC_MODULE = "grpc"


class GenerationStream:
    """The batches of one request. `cancel` frees its place, and may be repeated."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        """Raises OverloadedError or EngineUnavailableError where Serve or the replica fails."""
        try:
            return decode_batch(await self._response.__anext__())
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise translated(error) from error

    def cancel(self) -> None:
        """Tell the supervisor that nobody reads any more."""
        self._response.cancel()


class SupervisorClient:
    """All calls that a gateway makes. Payloads go by value, which streams several times faster."""

    def __init__(self, handle: DeploymentHandle) -> None:
        by_value = handle.options(_by_reference=False)
        self._generate = by_value.options(method_name="generate", stream=True)
        self._info = by_value.options(method_name="info")
        self._handle = handle

    def generate(self, generation: Generation) -> GenerationStream:
        """Start a request."""
        payload = msgspec.msgpack.encode(generation)
        return GenerationStream(self._generate.remote(payload, encode_ask(generation)))

    async def info(self, timeout_s: float) -> RankInfo:
        """What a replica says of its model. Raises EngineUnavailableError after `timeout_s`."""
        response = None
        try:
            response = self._info.remote()
            data = await asyncio.wait_for(response, timeout_s)
        except TimeoutError as error:
            if response is not None:
                response.cancel()
            raise EngineUnavailableError("The model is still being loaded.") from error
        except Exception as error:
            raise translated(error) from error
        return msgspec.msgpack.decode(data, type=RankInfo)

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        """The status of each running replica that answers in time."""
        response = self._handle.broadcast("status")
        try:
            found = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException):
            return []
        return [status for status in found if not isinstance(status, BaseException)]


def translated(error: Exception) -> Exception:
    """Ours for an error of Ray, Serve or gRPC; anything else as it is."""
    if isinstance(error, BackPressureError):
        return OverloadedError("Too many requests wait for the model.", _BACK_PRESSURE_RETRY_S)
    if isinstance(error, DeploymentUnavailableError):
        return EngineUnavailableError("The model could not be started; see the server's log.")
    foreign = isinstance(error, RayError | RayServeException)
    if foreign or type(error).__module__.partition(".")[0] == _GRPC_MODULE:
        return EngineUnavailableError("The model's replica is gone; another is being started.")
    return error
