"""What a supervisor sends to the gateway: batches of text, or one failure."""

from __future__ import annotations

import msgspec

from core.errors import CoterieError, RequestError
from core.request import Request
from deployments.detokenizer import PieceLogprob


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's call: a request, the strings that end it, and how it is to be answered."""

    request: Request
    stop: tuple[str, ...] = ()
    stream: bool = False
    """False: one batch with everything at the end."""
    special_text: tuple[int, ...] = ()
    """Special tokens that appear in the text: tool and reasoning parsers need their marks."""
    confidence: float = 0.0
    """The probability that the request's domain is right."""


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New text of one choice; the last one of a choice has a finish_reason and the counts."""

    index: int
    text: str = ""
    pieces: tuple[PieceLogprob, ...] = ()
    finish_reason: str | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    end_piece: PieceLogprob | None = None
    """The token that ended the choice and is no text, where log-probabilities are asked for."""
    prompt_pieces: tuple[PieceLogprob, ...] = ()
    """With a prompt's first delta where asked for: its tokens; the first has no log-probability."""

    @property
    def size(self) -> int:
        """About how many characters' worth of work it is to write it out."""
        pieces = (*self.prompt_pieces, *self.pieces)
        return len(self.text) // 16 + sum(1 + len(piece.top) for piece in pieces)


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request failed; nothing follows. `error_type` names a class of core.errors."""

    error_type: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: CoterieError) -> Failure:
        """From an exception."""
        return cls(
            error_type=type(error).__name__,
            message=str(error),
            param=error.param if isinstance(error, RequestError) else None,
            retry_after_s=getattr(error, "retry_after_s", None),
        )


Delta = TextDelta | Failure
Batch = tuple[Delta, ...]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def encode_batch(batch: Batch) -> bytes:
    """One item of the stream between supervisor and gateway."""
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> Batch:
    """The inverse of `encode_batch`."""
    return _decoder.decode(data)
