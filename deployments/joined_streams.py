"""The batches of several prompts of one request as one stream, choices numbered through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from core.errors import EngineUnavailableError
from deployments.text_delta import Batch, Failure, TextDelta


class BatchStream(Protocol):
    """The batches of one prompt, until it ends or is cancelled."""

    def __aiter__(self) -> AsyncIterator[Batch]:
        """Itself."""

    async def __anext__(self) -> Batch:
        """The next batch."""

    def cancel(self) -> None:
        """Free the prompt's place; may be repeated."""


class JoinedStreams:
    """Whichever prompt has news comes next. At most one batch of each is held here."""

    def __init__(self, streams: Sequence[BatchStream], choices: int) -> None:
        """`choices` of each prompt: choice i of prompt p becomes choice p * choices + i."""
        self._streams = streams
        self._choices = choices
        self._open = set(range(len(streams)))
        self._awaited: dict[asyncio.Task[Batch | None], int] = {}

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        if len(self._streams) == 1:
            return await anext(self._streams[0])
        while self._open:
            waiting = self._open - set(self._awaited.values())
            for number in sorted(waiting):
                self._awaited[asyncio.create_task(_next(self._streams[number]))] = number
            await asyncio.wait(self._awaited, return_when=asyncio.FIRST_COMPLETED)
            task = next(task for task in self._awaited if task.done())
            number = self._awaited.pop(task)
            batch = task.result()
            if batch is not None:
                return tuple(self._numbered(delta, number) for delta in batch)
            self._open.discard(number)
        raise StopAsyncIteration

    async def first(self) -> Batch:
        """The batch that decides whether there is an answer. Raises EngineUnavailableError."""
        try:
            return await anext(self)
        except StopAsyncIteration as end:
            raise EngineUnavailableError("The model's replica gave no answer.") from end

    def cancel(self) -> None:
        """Free the places of all prompts; may be repeated."""
        for task in self._awaited:
            task.cancel()
        self._awaited.clear()
        for stream in self._streams:
            stream.cancel()

    def _numbered(self, delta: TextDelta | Failure, number: int) -> TextDelta | Failure:
        if isinstance(delta, Failure):
            return delta
        return msgspec.structs.replace(delta, index=number * self._choices + delta.index)


async def _next(stream: BatchStream) -> Batch | None:
    return await anext(stream, None)
