"""What one chat request asks about tools and reasoning, and how its answer is made and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.errors import RequestError
from core.request import Structure
from deployments.answer_structure import AnswerStructure
from deployments.output_formats import OutputFormats
from deployments.output_parsers.parts import OutputParser
from deployments.tool_fields import NamedTool, Tool, ToolFields


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the model's text is bound and read."""

    structure: Structure | None
    """The form that the whole text must have, marks included."""
    new_parser: Callable[[], OutputParser] | None
    """A fresh parser for each choice; None where all text is content."""
    special_text: tuple[int, ...]
    """Special tokens whose text the parser must see."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, checked."""

    template_kwargs: dict[str, Any]
    """What the chat template is given besides the messages and the request's own arguments."""
    _formats: OutputFormats
    _callable: tuple[Tool, ...]
    """Tools that may be called; none: calls in the text are plain text."""
    _required: bool
    _single: bool

    @classmethod
    def of(cls, asked: ToolFields, formats: OutputFormats) -> ToolUse:
        """From a request's fields. Raises RequestError for what this model cannot do."""
        tools = tuple(asked.tools or ())
        names = [tool.function.name for tool in tools]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise RequestError(
                f"expected tools of different names, found {twice!r} twice.", "tools"
            )
        choice = asked.tool_choice or "auto"
        required = choice == "required" or isinstance(choice, NamedTool)
        if required and not tools:
            raise RequestError("This tool_choice needs at least one tool.", "tool_choice")
        kwargs: dict[str, Any] = {}
        if asked.reasoning_effort is not None:
            if not formats.knows_reasoning_effort:
                raise RequestError(
                    "Unsupported field: reasoning_effort. This model's chat template does not read "
                    "it; leave it out.",
                    "reasoning_effort",
                )
            kwargs["reasoning_effort"] = asked.reasoning_effort
        if choice == "none":
            tools = ()
        if tools:
            formats.check_tools()
            kwargs["tools"] = [tool.for_template() for tool in tools]
        if isinstance(choice, NamedTool):
            tools = tuple(tool for tool in tools if tool.function.name == choice.function.name)
            if not tools:
                raise RequestError(
                    f"tool_choice names {choice.function.name[:64]!r}; expected one of the tools: "
                    f"{', '.join(names)[:400]}.",
                    "tool_choice",
                )
        single = asked.parallel_tool_calls is False or isinstance(choice, NamedTool)
        return cls(kwargs, formats, tools, required, single)

    def plan(self, prompt_ids: tuple[int, ...], structure: Structure | None = None) -> OutputPlan:
        """The answer's form and parser after this prompt; `structure` binds the answer's content.

        A structure that the request asks for binds what the reader gets, not the reasoning before
        it and not the calls of tools instead of it.
        """
        thinking = self._formats.thinking(prompt_ids)
        form = AnswerStructure(self._formats, thinking)
        if self._callable and (self._required or self._is_bound()):
            structure = form.with_calls(
                self._callable, structure, required=self._required, single=self._single
            )
        elif structure is not None:
            structure = form.with_content(structure, self._callable, self._single)
        new_parser = self._formats.parser_factory(self._callable, thinking)
        marks = () if new_parser is None else self._formats.special_marks(bool(self._callable))
        return OutputPlan(structure, new_parser, marks)

    def _is_bound(self) -> bool:
        return self._single or any(tool.function.strict for tool in self._callable)
