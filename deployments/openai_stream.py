"""Batches of text to OpenAI's response shapes: one body, or server-sent events.

The shapes are written as plain dicts: importing the openai package's types costs a gateway 830
modules, and making one chunk by them fifty times as much. Tests hold every shape against them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import msgspec

from core.errors import EngineUnavailableError
from deployments.answer_form import AnswerForm
from deployments.choice_text import ChoiceText
from deployments.detokenizer import PieceLogprob
from deployments.openai_logprobs import Json, prompt_logprobs
from deployments.text_delta import TextDelta

DONE = b"data: [DONE]\n\n"


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Answer:
    """One response being written: `events` for a stream, or `body` for all at once."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._object = "chat.completion" if form.chat else "text_completion"
        self._created = int(time.time())
        self._choices = [
            ChoiceText(form, number, form.prompts[number // form.made])
            for number in range(form.choices)
        ]
        self._scored: dict[int, tuple[PieceLogprob, ...]] = {}
        """The tokens of each prompt with their log-probabilities, where asked for."""
        self._prompt_tokens = sum(len(prompt.ids) for prompt in form.prompts)
        self._cached_tokens: dict[int, int] = {}

    def events(self, delta: TextDelta) -> bytes:
        """The events of one delta: the role before a chat choice's first text, the text, its end.

        The finish reason comes in the same chunk as the last text.
        """
        choice = self._count(delta)
        if self._form.chat:
            return b"".join(event(self._chunk([entry])) for entry in choice.chat_chunks(delta))
        return event(self._chunk([choice.completion_choice(delta, self._prompt_pieces(delta))]))

    def all_events(self, deltas: Seq[TextDelta]) -> bytes:
        """The events of several deltas."""
        return b"".join(self.events(delta) for delta in deltas)

    def last_events(self) -> bytes:
        """Usage where asked for, then the end mark."""
        if not self._form.include_usage:
            return DONE
        return event({**self._chunk([]), "usage": self._usage()}) + DONE

    def body(self, deltas: Seq[TextDelta]) -> Json:
        """The whole response from one delta a choice. Raises EngineUnavailableError."""
        if sorted(delta.index for delta in deltas) != list(range(self._form.choices)):
            raise EngineUnavailableError("The model's replica gave a part of the answer only.")
        deltas = sorted(deltas, key=lambda delta: delta.index)
        for delta in deltas:
            self._count(delta)
        choices = []
        for delta in self._likeliest(deltas):
            text = self._choices[delta.index]
            if self._form.chat:
                choices.append(text.chat_choice(delta))
            else:
                choices.append(text.completion_choice(delta, self._prompt_pieces(delta)))
        for number, choice in enumerate(choices):
            choice["index"] = number
        whole = {**self._head(self._object), "choices": choices, "usage": self._usage()}
        if self._form.chat and self._form.prompt_logprobs:
            whole["prompt_logprobs"] = prompt_logprobs(self._scored.get(0, ()))
        return whole

    def _count(self, delta: TextDelta) -> ChoiceText:
        prompt, first = divmod(delta.index, self._form.made)
        if first == 0:
            # The choices share one prompt; the first one pays for what was not cached.
            cached = self._cached_tokens.get(prompt, 0)
            self._cached_tokens[prompt] = max(cached, delta.cached_tokens)
        if delta.prompt_pieces:
            self._scored[prompt] = delta.prompt_pieces
        choice = self._choices[delta.index]
        choice.completion_tokens = max(choice.completion_tokens, delta.completion_tokens)
        return choice

    def _prompt_pieces(self, delta: TextDelta) -> tuple[PieceLogprob, ...]:
        return self._scored.get(delta.index // self._form.made, ())

    def _likeliest(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """The given ones of the made answers to each prompt, by log-probability per token."""
        form = self._form
        if form.given == form.made:
            return deltas
        best: list[TextDelta] = []
        for begin in range(0, len(deltas), form.made):
            own = sorted(deltas[begin : begin + form.made], key=_mean_logprob, reverse=True)
            best += own[: form.given]
        return best

    def _head(self, kind: str) -> Json:
        name = {"id": self._form.request_id, "object": kind}
        return {**name, "created": self._created, "model": self._form.model}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._form.chat else self._object
        chunk = {**self._head(kind), "choices": choices}
        if self._form.include_usage:
            chunk["usage"] = self._usage() if self._form.continuous_usage else None
        return chunk

    def _usage(self) -> Json:
        completion_tokens = sum(choice.completion_tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }


def _mean_logprob(delta: TextDelta) -> float:
    values = [piece.logprob for piece in delta.pieces if piece.logprob is not None]
    return sum(values) / len(values) if values else float("-inf")
