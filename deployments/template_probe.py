"""What a chat template does with tools, found by trying it on a small chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.errors import RequestError
from deployments.chat_template import ChatTemplate

_TOOL, _KEY, _VALUE = "probed_tool", "probed_key", "probed_value"
_PARAMETERS = {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]}
_FUNCTION = {"name": _TOOL, "description": "A probe.", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_CALL_ID = "probe0001"
"""Nine letters and digits: some templates take nothing else."""


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Templates disagree about the turns that call tools; this is what one of them takes."""

    prints_tools: bool = False
    arguments_as_text: bool = False
    """Whether a call's arguments are handed over as JSON text, not as an object."""
    no_content: str | None = None
    """The content of a turn that only calls tools."""

    @classmethod
    def of(cls, template: ChatTemplate) -> TemplateProbe:
        """By trying the four ways to write such a turn; the first that is printed whole counts."""
        prints_tools = _TOOL in _rendered(template, [{"role": "user", "content": "Hi"}], _TOOLS)
        for as_text in (False, True):
            for content in (None, ""):
                printed = _rendered(template, _chat(as_text, content), _TOOLS)
                if prints_tools and _is_whole(printed):
                    return cls(prints_tools, as_text, content)
        return cls(prints_tools)


def _chat(as_text: bool, content: str | None) -> list[dict[str, Any]]:
    arguments: Any = f'{{"{_KEY}": "{_VALUE}"}}' if as_text else {_KEY: _VALUE}
    function = {"name": _TOOL, "arguments": arguments}
    call = {"type": "function", "id": _CALL_ID, "function": function}
    answer = {"role": "tool", "content": "Done", "tool_call_id": _CALL_ID, "name": _TOOL}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        answer,
    ]


def _is_whole(printed: str) -> bool:
    """The value is there; neither Python's spelling of an object nor its None is."""
    return _VALUE in printed and f"{{'{_KEY}'" not in printed and "None" not in printed


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> str:
    try:
        return template.render(messages, {}, {"tools": tools})
    except RequestError:
        return ""
