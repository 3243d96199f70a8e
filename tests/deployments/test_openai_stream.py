"""Answers with parts: reasoning and tool calls, streamed and whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.errors import EngineUnavailableError
from deployments.answer_form import AnswerForm
from deployments.detokenizer import PieceLogprob
from deployments.openai_stream import DONE, Answer
from deployments.output_parsers.parts import (
    ContentPart,
    Part,
    ReasoningPart,
    ToolCallArguments,
    ToolCallStart,
)
from deployments.prompt_text import PromptText
from deployments.text_delta import TextDelta


@dataclass
class Letters:
    """Small letters are reasoning, capitals content, a digit begins a call, others its arguments.

    The last letter is held back until more comes.
    """

    held: str = ""
    calls: int = 0
    parts: list[Part] = field(default_factory=list)

    def push(self, text: str) -> list[Part]:
        letters, self.held = (self.held + text)[:-1], (self.held + text)[-1:]
        return [self.part(letter) for letter in letters]

    def finish(self) -> list[Part]:
        return [self.part(letter) for letter in self.held]

    def part(self, letter: str) -> Part:
        if letter.isdigit():
            self.calls += 1
            return ToolCallStart(self.calls - 1, f"call_{letter}", f"tool{letter}")
        if letter.isupper():
            return ContentPart(letter)
        if letter.islower():
            return ReasoningPart(letter)
        return ToolCallArguments(self.calls - 1, letter)


def form(**changes: Any) -> AnswerForm:
    prompt = PromptText((1, 2, 3))
    values = {"chat": True, "request_id": "x", "model": "m", "prompts": (prompt,)}
    return AnswerForm(**{**values, "parser": Letters, **changes})


def whole(text: str, reason: str = "stop", **changes: Any) -> dict[str, Any]:
    delta = TextDelta(index=0, text=text, finish_reason=reason, completion_tokens=len(text))
    body = Answer(form(**changes)).body([delta])
    ChatCompletion.model_validate(body, strict=True)
    return dict(body["choices"][0])


def streamed(pieces: list[str], reason: str = "stop") -> list[dict[str, Any]]:
    answer = Answer(form())
    deltas = [TextDelta(index=0, text=piece) for piece in pieces]
    deltas.append(TextDelta(index=0, finish_reason=reason))
    data = b"".join(answer.events(delta) for delta in deltas)
    chunks = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return [chunk["choices"][0] for chunk in chunks]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            own = message["tool_calls"].setdefault(call["index"], {"arguments": ""})
            own |= {key: call[key] for key in ("id", "type") if key in call}
            own["arguments"] += call["function"]["arguments"]
            own.setdefault("name", call["function"].get("name"))
    return message


TEXT = "abAB1{}2{!}cC"


def test_a_whole_answer_holds_its_parts() -> None:
    choice = whole(TEXT)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "ABC",
        "refusal": None,
        "reasoning_content": "abc",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "tool1", "arguments": "{}"}},
            {"id": "call_2", "type": "function", "function": {"name": "tool2", "arguments": "{!}"}},
        ],
    }


def test_content_is_null_only_beside_tool_calls() -> None:
    assert whole("1{}")["message"]["content"] is None
    for text in ("", "a"):
        assert whole(text)["message"]["content"] == ""
        assert "tool_calls" not in whole(text)["message"]


def test_an_answer_cut_in_a_call_says_length() -> None:
    assert whole("1{", "length")["finish_reason"] == "length"
    assert streamed(["1{"], "length")[-1]["finish_reason"] == "length"
    assert streamed(["A"])[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
def test_a_stream_joins_to_the_whole(size: int) -> None:
    choices = streamed([TEXT[i : i + size] for i in range(0, len(TEXT), size)])
    message = joined(choices)
    expected = whole(TEXT)["message"]
    assert message["content"] == expected["content"]
    assert message["reasoning_content"] == expected["reasoning_content"]
    for number, call in enumerate(expected["tool_calls"]):
        own = message["tool_calls"][number]
        assert own == {"id": call["id"], "type": "function", **call["function"]}
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
        "tool_calls"
    ]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}


def test_text_that_a_parser_holds_back_makes_no_empty_chunk() -> None:
    assert len(streamed(["A", "B", "C"])) == 1 + 2 + 1


def test_each_choice_has_a_parser_of_its_own() -> None:
    answer = Answer(form(made=2, given=2))
    deltas = [TextDelta(index=i, text="1{}", finish_reason="stop") for i in (1, 0)]
    choices = answer.body(deltas)["choices"]
    assert [choice["message"]["tool_calls"][0]["id"] for choice in choices] == ["call_1"] * 2


def test_an_answer_that_lacks_a_choice_is_no_answer() -> None:
    with pytest.raises(EngineUnavailableError):
        Answer(form(made=2, given=2)).body([TextDelta(index=0, finish_reason="stop")])


def test_of_many_the_likeliest_by_token_are_given() -> None:
    def made(index: int, *logprobs: float) -> TextDelta:
        pieces = tuple(PieceLogprob("t", b"t", logprob) for logprob in logprobs)
        return TextDelta(index=index, text=f"T{index}", pieces=pieces, finish_reason="stop")

    deltas = [made(0, -3.0), made(1, -1.0, -1.5), made(2), made(3, -0.5, -4.0)]
    answer = Answer(form(made=4, given=2, parser=None))
    body = answer.body(deltas)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["T1", "T3"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]


def test_the_end_of_a_stream_has_usage_where_asked_for() -> None:
    assert Answer(form()).last_events() == DONE
    assert (
        b'"choices":[],"usage":{"prompt_tokens":3' in Answer(form(include_usage=True)).last_events()
    )
