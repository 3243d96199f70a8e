"""The replicas of one deployment: the way to them, and what they say of their model."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from core.errors import EngineUnavailableError
from deployments.group_load import GroupLoad
from deployments.joined_streams import BatchStream
from deployments.metered_supervisors import MeteredSupervisors, Supervisors
from deployments.openai_logprobs import Json
from deployments.rank_channel import RankInfo
from deployments.settings import ServingSettings
from deployments.text_delta import Generation

_STATUS_TIMEOUT_S = 2.0
_LONG_BODY_BYTES = 64 * 1024
"""Prompts are held against the context before they are tokenised whole from here on."""


class ReplicaGroup:
    """Some or all of a model's replicas, with engine and pool settings of their own."""

    def __init__(
        self,
        supervisors: Supervisors,
        serving: ServingSettings,
        state: Callable[[], Awaitable[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`serving` holds this group's name and number of replicas.

        `state` tells the deployment's: "running", "idle" without a replica, or what Serve calls
        its trouble.
        """
        self.name = serving.group
        """Among the groups of its model; "" where it has none."""
        self.serving = serving
        self._supervisors = MeteredSupervisors(supervisors, serving.replicas)
        self._state = state
        self._info: RankInfo | None = None
        self.load = GroupLoad(serving.replicas, clock)

    async def info(self) -> RankInfo:
        """What a replica says of its model. Raises EngineUnavailableError."""
        if self._info is None:
            try:
                self._info = await self._supervisors.info(self.serving.rank_wait_s)
            except EngineUnavailableError:
                self.load.failed()
                raise
            self.load.answered()
        return self._info

    async def context_tokens(self, body: bytes) -> int | None:
        """The limit for prompt and answer; None for a body too short to matter."""
        return (await self.info()).context_tokens if len(body) > _LONG_BODY_BYTES else None

    def generate(self, generation: Generation) -> BatchStream:
        """Start a request."""
        return self._supervisors.generate(generation)

    async def statuses(self) -> list[dict[str, float]]:
        """One status a running replica."""
        return await self._supervisors.statuses(_STATUS_TIMEOUT_S)

    async def ready(self) -> Json:
        """{ready, replicas, ready_replicas}: one runs, or may be started on demand."""
        may_idle = self.serving.min_replicas == 0
        state = await self._told_state() if may_idle else "running"
        statuses = await self.statuses() if state == "running" else []
        if not statuses and not may_idle:
            state = await self._told_state()
        ready = sum(1 for status in statuses if status["ready"])
        found: Json = {
            "ready": ready > 0 or (may_idle and state == "idle"),
            "replicas": len(statuses),
            "ready_replicas": ready,
        }
        if state not in ("running", "idle"):
            found["reason"] = f"the model's deployment is {state}"
        return found

    async def _told_state(self) -> str:
        return "running" if self._state is None else await self._state()
