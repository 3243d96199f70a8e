"""Batches of text to OpenAI's response shapes: one body, or server-sent events.

The shapes are written as plain dicts: importing the openai package's types costs a gateway 830
modules, and making one chunk by them fifty times as much. Tests hold every shape against them.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from deployments.detokenizer import PieceLogprob
from deployments.text_delta import TextDelta

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0

Json = dict[str, Any]


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Answer:
    """One response being written: `events` for a stream, or `body` for all at once."""

    def __init__(
        self,
        endpoint: Literal["chat", "completion"],
        request_id: str,
        model: str,
        prompt_tokens: int,
        with_logprobs: bool,
        include_usage: bool,
    ) -> None:
        self._chat = endpoint == "chat"
        self._object = "chat.completion" if self._chat else "text_completion"
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._prompt_tokens = prompt_tokens
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._chars: dict[int, int] = {}
        self._completion_tokens = 0
        self._cached_tokens = 0

    def events(self, delta: TextDelta) -> bytes:
        """The events of one delta: the role before a chat choice's first text, the text, its end.

        The finish reason comes in the same chunk as the last text.
        """
        self._count(delta)
        if not self._chat:
            choice = self._completion_choice(delta)
            return event(self._chunk([choice]))
        out = b""
        if delta.index not in self._chars:
            role = {"role": "assistant", "content": ""}
            out = event(self._chunk([self._chat_chunk_choice(delta.index, role, None, None)]))
        self._chars[delta.index] = 1
        if delta.text or delta.pieces or delta.finish_reason:
            content = {"content": delta.text} if delta.text else {}
            logprobs = self._chat_logprobs(delta.pieces)
            choice = self._chat_chunk_choice(delta.index, content, logprobs, delta.finish_reason)
            out += event(self._chunk([choice]))
        return out

    def last_events(self) -> bytes:
        """Usage where asked for, then the end mark."""
        if not self._include_usage:
            return DONE
        return event({**self._chunk([]), "usage": self._usage()}) + DONE

    def body(self, deltas: list[TextDelta]) -> Json:
        """The whole response from one delta a choice."""
        choices = []
        for delta in deltas:
            self._count(delta)
            if self._chat:
                choices.append(
                    {
                        "index": delta.index,
                        "message": {"role": "assistant", "content": delta.text, "refusal": None},
                        "logprobs": self._chat_logprobs(delta.pieces),
                        "finish_reason": delta.finish_reason,
                    }
                )
            else:
                choices.append(self._completion_choice(delta))
        return {**self._head(self._object), "choices": choices, "usage": self._usage()}

    def _count(self, delta: TextDelta) -> None:
        if delta.finish_reason is not None:
            self._completion_tokens += delta.completion_tokens
        if delta.index == 0:
            # The choices share one prompt; the first one pays for what was not cached.
            self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._chat else self._object
        usage = {"usage": None} if self._include_usage else {}
        return {**self._head(kind), "choices": choices, **usage}

    @staticmethod
    def _chat_chunk_choice(
        index: int, delta: Json, logprobs: Json | None, finish_reason: str | None
    ) -> Json:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _completion_choice(self, delta: TextDelta) -> Json:
        offset = self._chars.get(delta.index, 0)
        self._chars[delta.index] = offset + len(delta.text)
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._completion_logprobs(delta.pieces, offset),
            "finish_reason": delta.finish_reason,
        }

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _chat_logprobs(self, pieces: tuple[PieceLogprob, ...]) -> Json | None:
        if not self._with_logprobs:
            return None
        content = [
            {
                **_token_logprob(piece.token, piece.data, piece.logprob),
                "top_logprobs": [_token_logprob(*alternative) for alternative in piece.top],
            }
            for piece in pieces
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, pieces: tuple[PieceLogprob, ...], offset: int) -> Json | None:
        if not self._with_logprobs:
            return None
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece.data.decode("utf-8", errors="ignore"))
        return {
            "tokens": [_token_text(piece.token, piece.data) for piece in pieces],
            "token_logprobs": [_finite(piece.logprob) for piece in pieces],
            "top_logprobs": [
                {_token_text(token, data): _finite(logprob) for token, data, logprob in piece.top}
                for piece in pieces
            ],
            "text_offset": offsets,
        }


def _token_logprob(token: str, data: bytes, logprob: float) -> Json:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(data)}


def _token_text(token: str, data: bytes) -> str:
    """A token as a JSON key: parts of characters stay distinct, written as OpenAI writes them."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return token


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's own value for "impossible" is -9999."""
    return max(logprob, _LOWEST_LOGPROB)
