"""How one model writes reasoning and calls of tools: found once in its small files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from core.errors import RequestError
from deployments import model_files
from deployments.chat_template import ChatTemplate
from deployments.openai_messages import Message, template_messages
from deployments.output_parsers.harmony_library import HarmonyLibraryParser, open_encoding
from deployments.output_parsers.parts import OutputParser
from deployments.output_parsers.reasoning import PlainParser, ReasoningParser
from deployments.settings import ServingSettings
from deployments.template_probe import TemplateProbe
from deployments.tool_fields import Tool
from deployments.tool_formats import TOOL_FORMATS, ToolFormat, detect_tool_format, tool_names

Thinking = Literal["free", "inside", "over"]
"""What the prompt leaves to the model: whether to reason, to end reasoning, or to answer only."""

_PROMPT_TAIL_TOKENS = 16
REASONING_MARKS = {"think": ("<think>", "</think>"), "mistral_think": ("[THINK]", "[/THINK]")}
"""By the names that the setting `serving.reasoning_parser` takes."""


class OutputFormats:
    """The formats of one model, and what its template wants of messages."""

    def __init__(
        self,
        template: str | None,
        tokenizer: Tokenizer,
        probe: TemplateProbe,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._probe = probe
        source = template or ""
        self.knows_reasoning_effort = "reasoning_effort" in source
        """Whether the template reads the request's field of that name."""
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = frozenset(token.content for token in added.values())
        self.tools: ToolFormat | None = None
        if tool_parser == "auto":
            self.tools = detect_tool_format(source, vocabulary)
        elif tool_parser != "none":
            self.tools = TOOL_FORMATS[tool_parser]
        self.is_harmony = self.tools is TOOL_FORMATS["harmony"]
        self._harmony = open_encoding() if self.is_harmony else None
        self.reasoning: tuple[str, str] | None = None
        """The marks around reasoning; None where there are none, and for harmony's channels."""
        if reasoning_parser == "auto" and not self.is_harmony:
            marks = REASONING_MARKS.values()
            self.reasoning = next((pair for pair in marks if pair[1] in source), None)
        elif reasoning_parser not in ("auto", "none"):
            self.reasoning = REASONING_MARKS[reasoning_parser]
        known = {*(self.reasoning or ()), *(self.tools.marks if self.tools else ())}
        self.special = {
            token.content: token_id
            for token_id, token in added.items()
            if token.special and token.content in known
        }
        """Marks that are special tokens, and their ids."""

    @classmethod
    def open(cls, model_dir: Path, serving: ServingSettings) -> OutputFormats:
        """By the settings, or by the folder's template and vocabulary."""
        source = model_files.chat_template(model_dir)
        return cls(
            source,
            model_files.open_tokenizer(model_dir),
            TemplateProbe.of(ChatTemplate.open(model_dir)),
            serving.tool_parser,
            serving.reasoning_parser,
        )

    def check_tools(self) -> None:
        """Raises RequestError where this model cannot be offered tools."""
        if not self._probe.prints_tools:
            raise RequestError(
                "This model's chat template takes no tools; leave them out, or set tool_choice to "
                '"none".',
                "tools",
            )
        self.tool_format()

    def tool_format(self) -> ToolFormat:
        """The format of calls. Raises RequestError where none is known."""
        if self.tools is None:
            raise RequestError(
                "How this model writes calls of tools is not known here; leave tools out. The "
                f"server's setting serving.tool_parser may name it: {', '.join(TOOL_FORMATS)}.",
                "tools",
            )
        return self.tools

    def template_messages(self, messages: list[Message]) -> list[dict[str, Any]]:
        """The turns as this model's template reads them."""
        reasoning_name = "thinking" if self.is_harmony else "reasoning_content"
        return template_messages(
            messages, self._probe.arguments_as_text, self._probe.no_content, reasoning_name
        )

    def thinking(self, prompt_ids: tuple[int, ...]) -> Thinking:
        """Whether the prompt ends inside of reasoning that its template has opened, or after it."""
        if self.reasoning is None:
            return "free"
        tail = self._tokenizer.decode(
            list(prompt_ids[-_PROMPT_TAIL_TOKENS:]), skip_special_tokens=False
        )
        begin, end = self.reasoning
        tail = tail.rstrip()
        return "inside" if tail.endswith(begin) else "over" if tail.endswith(end) else "free"

    def parser_factory(
        self, tools: tuple[Tool, ...], thinking: Thinking
    ) -> Callable[[], OutputParser] | None:
        """Makes the parser of one answer; None where all text is content."""
        calls: Callable[[], OutputParser] | None = None
        if self.tools is not None and (tools or self.is_harmony):
            calls = partial(self.tools.new_parser, tools)
            if self._harmony is not None:
                calls = partial(HarmonyLibraryParser, self._harmony, tool_names(tools))
        if self.reasoning is None:
            return calls
        begin, end = self.reasoning
        inside = thinking == "inside"
        return lambda: ReasoningParser(begin, end, inside, (calls or PlainParser)())

    def special_marks(self, with_tools: bool) -> tuple[int, ...]:
        """Ids of the special tokens whose text a parser must see."""
        marks = set(self.reasoning or ())
        if self.tools is not None and (with_tools or self.is_harmony):
            marks.update(self.tools.marks)
        return tuple(sorted(self.special[mark] for mark in marks if mark in self.special))
