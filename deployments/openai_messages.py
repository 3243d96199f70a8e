"""The turns of a chat: what a request may send, and how chat templates read it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from deployments.field_kinds import MAX_LIST, Strict, Unsupported, fault

MAX_MESSAGES = 4096

_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    },
    "minItems": 1,
}
_CONTENT = {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]}


def _content(value: Any) -> str | None:
    """A message's content as one text: a text, or text parts joined by line ends."""
    if value is None or isinstance(value, str):
        return value
    parts = value if isinstance(value, list) and 0 < len(value) <= MAX_LIST else [None]
    texts = [str(part["text"]) for part in parts if isinstance(part, dict) and _is_text_part(part)]
    if len(texts) != len(parts):
        raise fault('expected a text, or a list of parts {"type": "text", "text": ...}')
    return "\n".join(texts)


def _is_text_part(part: dict[str, Any]) -> bool:
    return (
        part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)
    )


class CalledFunction(Strict):
    """What was called, with its arguments as one JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class ToolCall(Strict):
    """A call in an assistant's turn, as an answer gave it."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Its place in a stream; clients that join streams send it back."""

    def for_template(self, arguments_as_text: bool) -> dict[str, Any]:
        """The call as chat templates read it."""
        arguments: Any = self.function.arguments
        if not arguments_as_text:
            arguments = _object(arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", "id": self.id, "function": function}


def _object(text: str) -> Any:
    """The arguments as an object; as they are where a model wrote what is none."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(_content), WithJsonSchema(_CONTENT)] = None
    """May be left out where an assistant's turn calls tools."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_LIST)] | None = None
    """Of an assistant's turn."""
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Of a tool's turn: the call that it answers."""
    reasoning_content: str | None = None
    """Of an assistant's turn: what its answer gave under this name."""
    refusal: Annotated[None, Unsupported("answers have no refusals.")] = None
    annotations: Annotated[None, Unsupported("answers have no annotations.", ([],))] = None
    audio: Annotated[None, Unsupported("answers are text.")] = None
    function_call: Annotated[None, Unsupported("its newer name is tool_calls.")] = None

    @model_validator(mode="after")
    def _role_fields(self) -> Message:
        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content"):
                if getattr(self, name) is not None:
                    raise fault(f"only an assistant's turn has {name}; leave it out")
        if (self.role == "tool") != (self.tool_call_id is not None):
            need = "needs" if self.role == "tool" else "cannot have"
            raise fault(f"a turn of role {self.role!r} {need} a tool_call_id")
        silent = self.role == "assistant" and (self.tool_calls or self.reasoning_content)
        if self.content is None and not silent:
            raise fault(f"a turn of role {self.role!r} needs content, a text or parts of text")
        return self

    def for_template(
        self,
        arguments_as_text: bool = False,
        no_content: str | None = None,
        reasoning_name: str = "reasoning_content",
    ) -> dict[str, Any]:
        """The turn as chat templates read it; those differ in the three things asked here."""
        content = self.content or no_content if self.tool_calls else self.content
        turn: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            turn[reasoning_name] = self.reasoning_content
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template(arguments_as_text) for call in self.tool_calls]
        return turn


def template_messages(
    messages: list[Message], arguments_as_text: bool, no_content: str | None, reasoning_name: str
) -> list[dict[str, Any]]:
    """All turns as chat templates read them; a tool's turn is given the name of what was called."""
    names = {call.id: call.function.name for turn in messages for call in turn.tool_calls or ()}
    turns = [
        message.for_template(arguments_as_text, no_content, reasoning_name) for message in messages
    ]
    for turn in turns:
        called = names.get(turn.get("tool_call_id", ""))
        if called is not None:
            turn.setdefault("name", called)
    return turns
