"""Several prompts' batches as one stream: in any order, and without leftovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from core.errors import EngineUnavailableError
from deployments.joined_streams import JoinedStreams
from deployments.text_delta import Batch, Failure, TextDelta


class Source:
    """Gives a batch each `pause_s`."""

    def __init__(self, *batches: Batch | Exception, pause_s: float = 0.0) -> None:
        self.batches = list(batches)
        self.pause_s = pause_s
        self.cancelled = 0

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        await asyncio.sleep(self.pause_s)
        if not self.batches:
            raise StopAsyncIteration
        batch = self.batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def cancel(self) -> None:
        self.cancelled += 1


def text(index: int, letters: str) -> Batch:
    return (TextDelta(index=index, text=letters),)


async def collect(streams: JoinedStreams) -> list[tuple[int, str]]:
    return [(x.index, x.text) async for batch in streams for x in batch]


def test_choices_are_renumbered_and_keep_their_order() -> None:
    fast = Source(text(0, "a"), text(1, "b"), text(0, "c"))
    slow = Source(text(0, "x"), text(1, "y"), pause_s=0.01)
    found = asyncio.run(collect(JoinedStreams([slow, fast], 2)))
    assert [item for item in found if item[0] < 2] == [(0, "x"), (1, "y")]
    assert [item for item in found if item[0] >= 2] == [(2, "a"), (3, "b"), (2, "c")]


def test_one_stream_passes_as_it_is() -> None:
    assert asyncio.run(collect(JoinedStreams([Source(text(1, "a"))], 2))) == [(1, "a")]


def test_failures_pass_and_exceptions_are_raised() -> None:
    failure = Failure(error_type="RoutingError", message="x")

    async def run() -> None:
        assert await JoinedStreams([Source((failure,)), Source()], 1).first() == (failure,)
        with pytest.raises(EngineUnavailableError, match="gone"):
            await JoinedStreams([Source(EngineUnavailableError("gone")), Source()], 1).first()
        with pytest.raises(EngineUnavailableError):
            await JoinedStreams([Source(), Source()], 1).first()

    asyncio.run(run())


def test_a_cancel_ends_every_prompt_and_leaves_no_task() -> None:
    sources = [Source(text(0, "a"), pause_s=60) for _ in range(3)]

    async def run() -> None:
        streams = JoinedStreams(sources, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(streams), 0.02)
        streams.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert [source.cancelled for source in sources] == [1, 1, 1]
