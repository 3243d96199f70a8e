"""The fields of a chat request that offer tools, and how much is to be reasoned."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from deployments.field_kinds import Strict
from deployments.tool_schema import checked_parameters

MAX_TOOLS = 512

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Parameters = Annotated[
    dict[str, Any] | None, PlainValidator(checked_parameters), WithJsonSchema({"type": "object"})
]


class Function(Strict):
    """What a tool does, and the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None
    """Whether the arguments must follow `parameters` to the letter, even where calls are free."""


class Tool(Strict):
    """One tool the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        function: dict[str, Any] = {"name": self.function.name}
        # Templates join and print these without asking whether they are there.
        function["description"] = self.function.description or ""
        function["parameters"] = self.arguments_schema
        return {"type": "function", "function": function}

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments; without one a tool takes none."""
        return self.function.parameters or {"type": "object", "properties": {}}


class NamedFunction(Strict):
    """The name of a tool."""

    name: str


class NamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ToolFields(Strict):
    """The fields about tools and reasoning. None means: left out."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Left out: "auto" where there are tools."""
    parallel_tool_calls: bool | None = None
    """False: one call an answer at most."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Handed to the chat template; refused where that does not read it."""
