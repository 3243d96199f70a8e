"""A gateway over HTTP without sockets, whose replicas note what they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from deployments.gateway import Gateway
from deployments.http_api import make_http_api
from deployments.rank_channel import RankInfo
from deployments.replica_group import ReplicaGroup
from deployments.request_labels import Labeller
from deployments.served_model import ServedModel
from deployments.served_models import ServedModels
from deployments.settings import ServingSettings
from deployments.text_delta import Batch, Generation, TextDelta
from deployments.text_threads import TextThreads

INFO = RankInfo(
    pid=1, model_type="x", vocab_size=267, context_tokens=5000, max_sequences=64, eos_ids=(0,)
)


class NotingReplicas:
    """Answer every prompt with one batch, and keep what was asked."""

    def __init__(self) -> None:
        self.asked: list[Generation] = []

    def generate(self, generation: Generation) -> OneBatch:
        self.asked.append(generation)
        return OneBatch()

    async def info(self, timeout_s: float) -> RankInfo:
        return INFO

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        return [{"ready": 1.0}]


class OneBatch:
    def __init__(self) -> None:
        self._left = [TextDelta(index=0, text="Yes", finish_reason="stop", completion_tokens=1)]

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        if not self._left:
            raise StopAsyncIteration
        return (self._left.pop(),)

    def cancel(self) -> None:
        pass


class LabelledGateway:
    """`ask` posts bodies one after the other; `together` is the way to send them at once."""

    def __init__(
        self, folder: Path, labeller: Labeller | None, serving: ServingSettings | None = None
    ) -> None:
        self.replicas = NotingReplicas()
        serving = serving or ServingSettings()
        threads = TextThreads()
        group = ReplicaGroup(self.replicas, serving, None)
        model = ServedModel("tiny", folder, serving, [group], threads)
        self.gateway = Gateway(ServedModels([model]), serving, threads, labeller=labeller)

    def ask(
        self, path: str, body: dict[str, Any], headers: Any = None, method: str = "POST"
    ) -> httpx.Response:
        async def send(client: httpx.AsyncClient) -> httpx.Response:
            return await client.request(method, path, json=body, headers=headers)

        response: httpx.Response = self.together(send)
        return response

    def together(self, work: Callable[[httpx.AsyncClient], Any]) -> Any:
        async def run() -> Any:
            transport = httpx.ASGITransport(make_http_api(self.gateway))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await work(client)

        return asyncio.run(run())

    def labels(self) -> Sequence[tuple[str, str, float]]:
        """(domain, session, confidence) of what the replicas were asked for, in order."""
        return [(g.request.domain, g.request.session, g.confidence) for g in self.replicas.asked]
