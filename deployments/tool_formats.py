"""How model families write calls of tools: the parser of each, and the form for the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deployments.output_parsers import deepseek, harmony, llama, mistral
from deployments.output_parsers.deepseek import DeepSeekParser
from deployments.output_parsers.harmony import HarmonyParser
from deployments.output_parsers.hermes import HermesParser
from deployments.output_parsers.llama import LlamaParser
from deployments.output_parsers.mistral import MistralParser
from deployments.output_parsers.parts import OutputParser
from deployments.output_parsers.xml_calls import GLM, QWEN_CODER, XmlCallsParser
from deployments.tool_fields import Tool

_QUOTED_NAME = re.compile(r'\\?"name\\?"\s*:')
_NAME = "\0"
"""Where the tool's name stands in `ToolFormat.call`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's calls: begin, call, arguments, call_end, separator, call, ..., end."""

    name: str
    new_parser: Callable[[tuple[Tool, ...]], OutputParser]
    call: str
    call_end: str
    separator: str | None
    """Between two calls; None where an answer has one call at most."""
    begin: str = ""
    end: str = ""
    trigger: str | None = None
    """What no free text may hold, as a call begins with it; None: calls fill the whole answer."""
    marks: tuple[str, ...] = ()
    """Marks that may be special tokens."""
    style: Literal["json", "qwen_xml", "glm_xml"] = "json"
    quotes_name: bool = False

    def call_of(self, name: str) -> str:
        """What stands before the arguments of this tool."""
        return self.call.replace(_NAME, json.dumps(name) if self.quotes_name else name)


def tool_names(tools: tuple[Tool, ...]) -> frozenset[str]:
    """What the tools are called."""
    return frozenset(tool.function.name for tool in tools)


def _xml(tools: tuple[Tool, ...]) -> dict[str, dict[str, object]]:
    return {tool.function.name: tool.arguments_schema for tool in tools}


_HERMES = ToolFormat(
    "hermes",
    lambda tools: HermesParser(),
    call=f'<tool_call>\n{{"name": {_NAME}, "arguments": ',
    call_end="}\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    quotes_name=True,
)
_QWEN_CODER = ToolFormat(
    "qwen3_coder",
    lambda tools: XmlCallsParser(QWEN_CODER, _xml(tools)),
    call=f"<tool_call>\n<function={_NAME}>\n",
    call_end="\n</function>\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    style="qwen_xml",
)
_GLM = ToolFormat(
    "glm4",
    lambda tools: XmlCallsParser(GLM, _xml(tools)),
    call=f"<tool_call>{_NAME}\n",
    call_end="\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    style="glm_xml",
)
_MISTRAL = ToolFormat(
    "mistral",
    lambda tools: MistralParser(),
    begin="[TOOL_CALLS][",
    call=f'{{"name": {_NAME}, "arguments": ',
    call_end="}",
    separator=", ",
    end="]",
    trigger="[TOOL_CALLS]",
    marks=mistral.MARKS,
    quotes_name=True,
)
_MISTRAL_V11 = ToolFormat(
    "mistral_v11",
    lambda tools: MistralParser(),
    call=f"[TOOL_CALLS]{_NAME}[ARGS]",
    call_end="",
    separator="",
    trigger="[TOOL_CALLS]",
    marks=mistral.MARKS,
)
_DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    lambda tools: DeepSeekParser(),
    begin=deepseek.CALLS,
    call=f"{deepseek.CALL}function{deepseek.SEPARATOR}{_NAME}\n```json\n",
    call_end=f"\n```{deepseek.CALL_END}",
    separator="\n",
    end=deepseek.CALLS_END,
    trigger=deepseek.CALLS,
    marks=deepseek.MARKS,
)
_DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    lambda tools: DeepSeekParser(),
    begin=deepseek.CALLS,
    call=f"{deepseek.CALL}{_NAME}{deepseek.SEPARATOR}",
    call_end=deepseek.CALL_END,
    separator="",
    end=deepseek.CALLS_END,
    trigger=deepseek.CALLS,
    marks=deepseek.MARKS,
)
_HARMONY = ToolFormat(
    "harmony",
    lambda tools: HarmonyParser(tool_names(tools)),
    call=f"<|channel|>commentary to=functions.{_NAME} <|constrain|>json<|message|>",
    call_end="",
    separator=None,
    marks=harmony.MARKS,
)
_LLAMA_JSON = ToolFormat(
    "llama3_json",
    lambda tools: LlamaParser(tool_names(tools)),
    call=f'{{"name": {_NAME}, "parameters": ',
    call_end="}",
    separator="; ",
    marks=llama.MARKS,
    quotes_name=True,
)
_LLAMA_PYTHONIC = ToolFormat(
    "llama_pythonic",
    lambda tools: LlamaParser(tool_names(tools)),
    # No grammar makes Python's arguments of a JSON schema; its parser reads this form as well.
    begin="[",
    call=f'{{"name": {_NAME}, "parameters": ',
    call_end="}",
    separator=", ",
    end="]",
    marks=llama.MARKS,
    quotes_name=True,
)
TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        _HERMES, _QWEN_CODER, _GLM, _MISTRAL, _MISTRAL_V11, _DEEPSEEK_V3, _DEEPSEEK_V31, _HARMONY,
        _LLAMA_JSON, _LLAMA_PYTHONIC,
    )
}  # fmt: skip
"""By the names that the setting `serving.tool_parser` takes."""


def detect_tool_format(template: str, vocabulary: frozenset[str]) -> ToolFormat | None:
    """The format that a template and the added tokens of a tokenizer speak of; None: none known."""
    name = _detect(template, vocabulary)
    return None if name is None else TOOL_FORMATS[name]


def _detect(template: str, vocabulary: frozenset[str]) -> str | None:
    def has(mark: str) -> bool:
        return mark in template or mark in vocabulary

    if {"<|channel|>", "<|message|>", "<|call|>"} <= vocabulary:
        return "harmony"
    if "[TOOL_CALLS]" in vocabulary:
        return "mistral_v11" if has("[ARGS]") else "mistral"
    if has(deepseek.CALLS):
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<arg_key>" in template:
        return "glm4"
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and _QUOTED_NAME.search(template):
        return "hermes"
    if "func_name1(" in template or "<|python_start|>" in vocabulary:
        return "llama_pythonic"
    if "<|python_tag|>" in vocabulary:
        return "llama3_json"
    return None
