"""From generations to the answer that a client reads: a whole body, or events as they come."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from core.errors import CoterieError, EngineUnavailableError
from deployments.answer_form import AnswerForm
from deployments.group_load import GroupLoad
from deployments.joined_streams import BatchStream, JoinedStreams
from deployments.openai_errors import envelope, exception_of
from deployments.openai_logprobs import Json
from deployments.openai_stream import DONE, Answer, event
from deployments.replica_group import ReplicaGroup
from deployments.served_models import Place
from deployments.text_delta import Batch, Failure, Generation, TextDelta
from deployments.text_threads import TextThreads

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class EventStream:
    """A started stream: server-sent events, and how to give it up."""

    events: AsyncIterator[bytes]
    cancel: Callable[[], None]


class Answering:
    """All answers that are being made in this process."""

    def __init__(self, threads: TextThreads) -> None:
        self.open_requests = 0
        self._threads = threads

    async def answer(
        self, form: AnswerForm, generations: list[Generation], place: Place, stream: bool
    ) -> Json | EventStream:
        """The whole answer, or its stream once the first text is there. Raises CoterieError.

        The visit of `place` ends with the answer.
        """
        batches = JoinedStreams(_start_all(generations, place.group), form.made)
        answer = Answer(form)
        load = place.group.load
        self.open_requests += 1

        def close() -> None:
            self.open_requests -= 1
            place.visit.end()
            batches.cancel()

        try:
            # The first batch decides the HTTP status: a refusal is no stream.
            first = await _checked(batches.first())
            load.answered()
            if not stream:
                deltas = await _all_deltas(first, batches, len(generations))
                size = sum(delta.size for delta in deltas)
                body = await self._threads.run(size, lambda: answer.body(deltas))
        except BaseException as error:
            close()
            if isinstance(error, EngineUnavailableError):
                load.failed()
            raise
        if not stream:
            close()
            return body
        to_close = [close]

        def cancel() -> None:
            if to_close:
                to_close.pop()()

        return EventStream(self._events(answer, first, batches, load), cancel)

    async def _events(
        self, answer: Answer, first: Batch, rest: JoinedStreams, load: GroupLoad
    ) -> AsyncIterator[bytes]:
        """Server-sent events of a started stream; a failure is one event before the end mark."""
        batch: Batch | None = first
        try:
            while batch is not None:
                deltas = [delta for delta in batch if isinstance(delta, TextDelta)]
                failures = [delta for delta in batch if isinstance(delta, Failure)]
                if failures:
                    raise exception_of(failures[0])
                size = sum(delta.size for delta in deltas)
                yield await self._threads.run(size, partial(answer.all_events, deltas))
                batch = await anext(rest, None)
        # The status line is gone: whatever happens now must be said in the stream, and once.
        except Exception as error:
            if not isinstance(error, CoterieError):
                log.exception("A stream broke")
            if isinstance(error, EngineUnavailableError):
                load.failed()
            yield event(envelope(error)[1]) + DONE
            return
        yield answer.last_events()


def _start_all(generations: list[Generation], group: ReplicaGroup) -> list[BatchStream]:
    """All of them or none."""
    streams: list[BatchStream] = []
    try:
        for generation in generations:
            streams.append(group.generate(generation))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


async def _checked(coming: Awaitable[Batch]) -> Batch:
    """A batch; a failure that no text comes before is raised."""
    batch = await coming
    if isinstance(batch[0], Failure):
        raise exception_of(batch[0])
    return batch


async def _all_deltas(first: Batch, rest: JoinedStreams, prompts: int) -> list[TextDelta]:
    """The deltas of an unstreamed answer: one batch a prompt."""
    batches = [first, *[await _checked(rest.first()) for _ in range(prompts - 1)]]
    return [delta for batch in batches for delta in batch if isinstance(delta, TextDelta)]
