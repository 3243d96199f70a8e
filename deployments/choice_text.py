"""One choice of an answer: its text taken apart, and OpenAI's shapes of the parts."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import Any

from deployments.answer_form import AnswerForm
from deployments.detokenizer import PieceLogprob
from deployments.openai_logprobs import (
    Json,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from deployments.output_parsers.parts import (
    ContentPart,
    Part,
    ReasoningPart,
    ToolCallArguments,
    ToolCallStart,
)
from deployments.prompt_text import PromptText
from deployments.text_delta import TextDelta


class ChoiceText:
    """Counts what one choice said so far, and writes what is new in it."""

    def __init__(self, form: AnswerForm, index: int, prompt: PromptText) -> None:
        self._form = form
        self._index = index
        self._prompt = prompt
        self._parser = form.parser() if form.parser is not None else None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = len(prompt.text) if form.echo else 0
        self._arguments: list[str] | None = None
        """Of the last call so far; None before the first."""
        self._begun = False
        self.completion_tokens = 0

    def chat_chunks(self, delta: TextDelta) -> list[Json]:
        """The `choices` entries of a stream: the role first, then each news with its end."""
        parts = self._take(delta)
        chunks = []
        if not self._begun:
            chunks.append(self._chat_chunk({"role": "assistant", "content": ""}, None, None))
        self._begun = True
        if parts or delta.pieces or delta.finish_reason:
            logprobs = chat_logprobs(delta.pieces) if self._form.logprobs else None
            reason = self._finish_reason(delta)
            chunks.append(self._chat_chunk(_delta_of(parts), logprobs, reason))
        return chunks

    def chat_choice(self, delta: TextDelta) -> Json:
        """The whole choice from one delta."""
        message = _message_of(self._take(delta))
        return {
            "index": self._index,
            "message": message,
            "logprobs": chat_logprobs(delta.pieces) if self._form.logprobs else None,
            "finish_reason": self._finish_reason(delta),
        }

    def completion_choice(self, delta: TextDelta, scored: tuple[PieceLogprob, ...]) -> Json:
        """A chunk's choice or the whole one. `scored` are the prompt's tokens, where asked for."""
        self.completion_tokens = delta.completion_tokens
        text, pieces = delta.text, delta.pieces
        if delta.end_piece is not None:
            # Here, unlike in a chat, the end is a token: who sums up an echo counts on one more.
            pieces += (delta.end_piece,)
        offsets = self._offsets(pieces)
        begins, self._begun = not self._begun, True
        if begins and self._form.echo:
            text = self._prompt.text + text
            pieces = scored + pieces
            offsets = [*self._prompt.offsets[: len(scored)], *offsets]
        choice: Json = {
            "index": self._index,
            "text": text,
            "logprobs": completion_logprobs(pieces, offsets) if self._form.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if begins and self._form.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(scored)
        return choice

    def _offsets(self, pieces: Iterable[PieceLogprob]) -> list[int]:
        """At which character of the choice's text each piece begins, the parts of one at it."""
        offsets = []
        for piece in pieces:
            offsets.append(self._chars)
            self._chars += len(self._decoder.decode(piece.data))
        return offsets

    def _take(self, delta: TextDelta) -> list[Part]:
        self.completion_tokens = delta.completion_tokens
        parts: list[Part] = [ContentPart(delta.text)] if delta.text else []
        if self._parser is not None:
            parts = self._parser.push(delta.text) if delta.text else []
            if delta.finish_reason is not None:
                parts = [*parts, *self._parser.finish()]
        for part in parts:
            if isinstance(part, ToolCallStart):
                self._arguments = []
            elif isinstance(part, ToolCallArguments) and self._arguments is not None:
                self._arguments.append(part.text)
        return parts

    def _finish_reason(self, delta: TextDelta) -> str | None:
        """What is to be run is told by "tool_calls"; a call that a stop string cut is not."""
        if delta.finish_reason != "stop" or self._arguments is None:
            return delta.finish_reason
        if not self._form.stops:
            return "tool_calls"
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return "stop"
        return "tool_calls"

    def _chat_chunk(self, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }


def _delta_of(parts: Iterable[Part]) -> Json:
    """What is new, as a chunk's `delta`; neighbouring parts of one tool call are one entry."""
    texts: dict[str, str] = {}
    calls: list[Json] = []
    for part in parts:
        if isinstance(part, ContentPart):
            texts["content"] = texts.get("content", "") + part.text
        elif isinstance(part, ReasoningPart):
            texts["reasoning_content"] = texts.get("reasoning_content", "") + part.text
        elif isinstance(part, ToolCallStart):
            calls.append({"index": part.call, **_call(part)})
        elif calls and calls[-1]["index"] == part.call:
            calls[-1]["function"]["arguments"] += part.text
        else:
            calls.append({"index": part.call, "function": {"arguments": part.text}})
    return {**texts, **({"tool_calls": calls} if calls else {})}


def _message_of(parts: Iterable[Part]) -> Json:
    """The whole message: content is null where there are tool calls and no text."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, ContentPart):
            content.append(part.text)
        elif isinstance(part, ReasoningPart):
            reasoning.append(part.text)
        elif isinstance(part, ToolCallStart):
            calls[part.call] = _call(part)
        else:
            calls[part.call]["function"]["arguments"] += part.text
    text = "".join(content)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [calls[number] for number in sorted(calls)]
    return message


def _call(part: ToolCallStart) -> Json:
    function = {"name": part.name, "arguments": ""}
    return {"id": part.call_id, "type": "function", "function": function}
