"""One request inside a supervisor: from the engine's outputs to batches of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from core.errors import CoterieError, EngineUnavailableError
from core.step import SequenceOutput
from deployments.detokenizer import Detokenizer, PieceLogprob, prompt_piece
from deployments.text_delta import Batch, Delta, Failure, Generation, TextDelta
from engine.token_pieces import TokenPieces


class LiveRequest:
    """Collects what its sequences produced; whoever answers the client awaits `batches`."""

    def __init__(self, generation: Generation, pieces: TokenPieces) -> None:
        self.request = generation.request
        self._stream = generation.stream
        self._pieces = pieces
        self._scored: list[PieceLogprob] = []
        """The prompt's tokens, where their log-probabilities are asked for, as far as they are."""
        if self.request.params.prompt_logprobs is not None:
            self._scored.append(prompt_piece(pieces, self.request.prompt_ids[0], None))
        self._texts = [
            Detokenizer(pieces, self.request.prompt_ids, generation.stop, generation.special_text)
            for _ in range(self.request.n)
        ]
        self._open = set(range(self.request.n))
        self._started: set[int] = set()
        self._pending: list[Delta] = []
        self._news = asyncio.Event()
        self.completion_tokens = 0
        self.failure: Failure | None = None

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self._open

    @property
    def started(self) -> bool:
        """Whether any of its tokens has come."""
        return bool(self._started)

    def feed(self, output: SequenceOutput) -> bool:
        """Take one step's output; True when a stop string ended the sequence by it.

        Outputs of a sequence that has ended are ignored: a cancellation takes a step to arrive.
        """
        if output.index not in self._open:
            return False
        if output.finish_reason in ("error", "cancelled"):
            message = output.error or "the engine gave the request up"
            kind = output.error_type or "CoterieError"
            self.fail(Failure(error_type=kind, message=message, param=output.error_param))
            return False
        if output.prompt_logprobs:
            for score in output.prompt_logprobs:
                token_id = self.request.prompt_ids[len(self._scored)]
                self._scored.append(prompt_piece(self._pieces, token_id, score))
            if not output.token_ids and output.finish_reason is None:
                return False  # parts of a prompt come together, with its first text
        text = self._texts[output.index]
        parts: list[str] = []
        pieces: list[PieceLogprob] = []
        unseen = len(output.token_ids)
        for position, token_id in enumerate(output.token_ids):
            logprob = output.logprobs[position] if output.logprobs else None
            released, ready = text.push(token_id, logprob)
            parts.append(released)
            pieces += ready
            unseen -= 1
            if text.stopped_by is not None:
                break
        reason = "stop" if text.stopped_by is not None else output.finish_reason
        if reason is not None:
            self._open.discard(output.index)
            self.completion_tokens += output.completion_tokens - unseen
            if text.stopped_by is None:
                released, ready = text.flush()
                parts.append(released)
                pieces += ready
        self._emit(
            TextDelta(
                index=output.index,
                text="".join(parts),
                pieces=tuple(pieces),
                finish_reason=reason,
                completion_tokens=output.completion_tokens - unseen,
                cached_tokens=output.cached_tokens,
                end_piece=text.end(output) if text.stopped_by is None else None,
                prompt_pieces=self._scored_prompt(output.index),
            )
        )
        return text.stopped_by is not None and output.finish_reason is None

    def fail(self, failure: Failure) -> None:
        """End all sequences with one failure; a request that is done stays as it is."""
        if self.done:
            return
        self._open.clear()
        self.failure = failure
        if not self._stream:
            self._pending.clear()
        self._pending.append(failure)
        self._news.set()

    async def batches(self) -> AsyncIterator[Batch]:
        """What came since the last batch, as soon as it came; all in one for an unstreamed one."""
        while True:
            await self._news.wait()
            self._news.clear()
            batch = tuple(self._pending)
            self._pending.clear()
            yield batch if self._stream else _merged(batch)
            if self.done and not self._pending:
                return

    def _scored_prompt(self, index: int) -> tuple[PieceLogprob, ...]:
        """The prompt's tokens with the first delta of the first choice, where asked for."""
        if index != 0 or index in self._started:
            return ()
        return tuple(self._scored)

    def _emit(self, delta: TextDelta) -> None:
        first = delta.index not in self._started
        if not (first or delta.text or delta.pieces or delta.finish_reason):
            return
        self._started.add(delta.index)
        self._pending.append(delta)
        if self._stream or self.done:
            self._news.set()


def failure_of(error: CoterieError | None) -> Failure:
    """What a client is told when the rank that ran its request is lost."""
    return Failure.of(error or EngineUnavailableError("the rank was lost"))


def _merged(batch: Batch) -> Batch:
    """One delta for each choice."""
    if any(isinstance(delta, Failure) for delta in batch):
        return tuple(delta for delta in batch if isinstance(delta, Failure))
    texts = [delta for delta in batch if isinstance(delta, TextDelta)]
    merged = []
    for index in sorted({delta.index for delta in texts}):
        mine = [delta for delta in texts if delta.index == index]
        merged.append(
            TextDelta(
                index=index,
                text="".join(delta.text for delta in mine),
                pieces=tuple(piece for delta in mine for piece in delta.pieces),
                finish_reason=mine[-1].finish_reason,
                completion_tokens=mine[-1].completion_tokens,
                cached_tokens=mine[-1].cached_tokens,
                end_piece=mine[-1].end_piece,
                prompt_pieces=mine[0].prompt_pieces,
            )
        )
    return tuple(merged)
