"""Log-probabilities of tokens in the shapes that the endpoints give them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from deployments.detokenizer import PieceLogprob

_LOWEST_LOGPROB = -9999.0

Json = dict[str, Any]


def chat_logprobs(pieces: Seq[PieceLogprob]) -> Json:
    """`logprobs` of a chat choice."""
    content = [
        {
            **_token_logprob(piece.token, piece.data, piece.logprob),
            "top_logprobs": [_token_logprob(*alternative) for alternative in piece.top],
        }
        for piece in pieces
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(pieces: Seq[PieceLogprob], offsets: Seq[int]) -> dict[str, Seq[Any]]:
    """`logprobs` of a completion's choice; `offsets` say at which character each piece begins."""
    return {
        "tokens": [_token_text(piece.token, piece.data) for piece in pieces],
        "token_logprobs": [_finite(piece.logprob) for piece in pieces],
        "top_logprobs": [_by_text(piece) for piece in pieces],
        "text_offset": offsets,
    }


def prompt_logprobs(pieces: Seq[PieceLogprob]) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each token null or, by token id, the token and the likeliest.

    The rank of a token that is not among the likeliest is not counted: null.
    """
    return [None if piece.logprob is None else _by_id(piece) for piece in pieces]


def _by_id(piece: PieceLogprob) -> Json:
    found = {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token}
        for rank, (token_id, (token, _, logprob)) in enumerate(
            zip(piece.top_ids, piece.top, strict=True), start=1
        )
    }
    own = {"logprob": _finite(piece.logprob), "rank": None, "decoded_token": piece.token}
    found.setdefault(str(piece.token_id), own)
    return found


def _by_text(piece: PieceLogprob) -> dict[str, float | None] | None:
    """The likeliest tokens and the chosen one; of equal texts the likelier. None for no value."""
    if piece.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for token, data, logprob in (*piece.top, (piece.token, piece.data, piece.logprob)):
        found.setdefault(_token_text(token, data), _finite(logprob))
    return found


def _token_logprob(token: str, data: bytes, logprob: float | None) -> Json:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(data)}


def _token_text(token: str, data: bytes) -> str:
    """A token as a JSON key: parts of characters stay distinct, written as OpenAI writes them."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return token


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI's own value for "impossible" is -9999."""
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)
