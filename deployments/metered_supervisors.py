"""The way to the supervisors on which all that a tenant uses is counted.

Every request to the model passes here, whatever route it came by, so none escapes its limits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from core.errors import OverloadedError
from deployments.exchange import CURRENT, Exchange
from deployments.joined_streams import BatchStream
from deployments.rank_channel import RankInfo
from deployments.text_delta import Batch, Failure, Generation


class Supervisors(Protocol):
    """What a gateway needs of the model's replicas."""

    def generate(self, generation: Generation) -> BatchStream:
        """Start a request."""

    async def info(self, timeout_s: float) -> RankInfo:
        """What a replica says of its model."""

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        """One status a running replica."""


_MAX_OFFERS = 3


class MeteredSupervisors:
    """Charges prompts before they are computed and tokens as they come."""

    def __init__(self, supervisors: Supervisors, replicas: int = 1) -> None:
        """A request that one of several `replicas` has no room for is offered to another."""
        self._supervisors = supervisors
        self._offers = min(replicas, _MAX_OFFERS)

    def generate(self, generation: Generation) -> BatchStream:
        """Start a request on behalf of the current exchange, where there is one."""
        exchange = CURRENT.get()
        if exchange is None:
            return self._supervisors.generate(generation)
        return MeteredStream(self._supervisors, generation, exchange, self._offers)

    async def info(self, timeout_s: float) -> RankInfo:
        """As it is."""
        return await self._supervisors.info(timeout_s)

    async def statuses(self, timeout_s: float) -> list[dict[str, float]]:
        """As they are."""
        return await self._supervisors.statuses(timeout_s)


class MeteredStream:
    """The batches of one prompt, counted."""

    def __init__(
        self,
        supervisors: Supervisors,
        generation: Generation,
        exchange: Exchange,
        offers: int,
    ) -> None:
        self._supervisors = supervisors
        self._generation = generation
        self._exchange = exchange
        self._offers_left = offers - 1
        self._seen: dict[int, int] = {}
        self._given_up = False
        exchange.start(generation)
        limited = exchange.lease is not None
        # A prompt that has to be charged first is sent when the charge is accepted.
        self._stream = None if limited else supervisors.generate(generation)

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        """The next batch. Raises TenantLimitError, or what the supervisors raise."""
        lease = self._exchange.lease
        if self._stream is None and self._given_up:
            raise StopAsyncIteration
        try:
            if self._stream is None:
                if lease is not None:
                    await lease.charge_prompt(len(self._generation.request.prompt_ids))
                if self._given_up:  # while it waited
                    raise StopAsyncIteration
                self._stream = self._supervisors.generate(self._generation)
            batch = await anext(self._stream)
            while self._offers_left and _is_refusal(batch) and not self._given_up:
                self._offers_left -= 1
                self._stream.cancel()
                self._stream = self._supervisors.generate(self._generation)
                batch = await anext(self._stream)
            self._offers_left = 0
        except StopAsyncIteration:
            self._exchange.open_streams -= 1
            if lease is not None and self._exchange.open_streams == 0:
                await lease.end()
            raise
        except Exception as error:
            self._exchange.failed(error)
            raise
        self._exchange.take(batch, self._seen)
        return batch

    def cancel(self) -> None:
        """Free the prompt's place; may be repeated."""
        self._given_up = True
        if self._stream is not None:
            self._stream.cancel()


def _is_refusal(batch: Batch) -> bool:
    """Whether a replica's queue was full, or it drains."""
    return any(
        isinstance(delta, Failure) and delta.error_type == OverloadedError.__name__
        for delta in batch
    )
