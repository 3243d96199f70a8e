"""The form of a whole answer for the grammar: reasoning first, then calls of tools or content.

Written in xgrammar's structural tag language; special tokens stand in it by their ids.
"""

from __future__ import annotations

import json
from typing import Any

from core.errors import RequestError
from core.request import Structure
from deployments.output_formats import OutputFormats, Thinking
from deployments.output_parsers import harmony
from deployments.tool_fields import Tool
from deployments.tool_formats import ToolFormat

Form = dict[str, Any]

_BLANK: Form = {"type": "regex", "pattern": r"[ \n]{0,4}"}
_NO_CALL = r"[^\s{\[<][\s\S]*"
"""Free text where nothing but its beginning tells a call from content."""


class AnswerStructure:
    """Forms for one model, after a prompt that has opened its reasoning, closed it, or neither."""

    def __init__(self, formats: OutputFormats, thinking: Thinking) -> None:
        self._formats = formats
        self._thinking = thinking

    def with_calls(
        self, tools: tuple[Tool, ...], content: Structure | None, *, required: bool, single: bool
    ) -> Structure:
        """Calls of these tools; unless they are required, or content, or content and then calls."""
        tool_format = self._formats.tool_format()
        calls = self._calls(tool_format, tools, single, strict=required)
        if not required:
            calls = self._free_or(tool_format, calls, content)
        return self._tagged(calls, "tools" if required or content is None else content.param)

    def with_content(self, content: Structure, tools: tuple[Tool, ...], single: bool) -> Structure:
        """The content bound, and calls instead of it where there are tools."""
        if tools:
            return self.with_calls(tools, content, required=False, single=single)
        reasons = self._formats.reasoning is not None and self._thinking != "over"
        if not (reasons or self._formats.is_harmony):
            return content
        return self._tagged(self._content(_form_of(content)), content.param)

    def _free_or(self, tool_format: ToolFormat, calls: Form, content: Structure | None) -> Form:
        if content is not None:
            return _either([calls, self._content(_form_of(content))])
        if self._formats.is_harmony:
            return _either([calls, self._content({"type": "any_text"})])
        if tool_format.trigger is None:
            return _either([calls, {"type": "regex", "pattern": _NO_CALL}])
        free = {"type": "any_text", "excludes": [tool_format.trigger]}
        return _sequence([free, {"type": "optional", "content": calls}])

    def _calls(
        self, tool_format: ToolFormat, tools: tuple[Tool, ...], single: bool, strict: bool
    ) -> Form:
        one = _either([self._call(tool_format, tool, strict) for tool in tools])
        parts = [*self._literal(tool_format.begin), one]
        if tool_format.separator is not None and not single:
            more = _sequence([*self._literal(tool_format.separator), one])
            parts.append({"type": "star", "content": more})
        return _sequence([*parts, *self._literal(tool_format.end)])

    def _call(self, tool_format: ToolFormat, tool: Tool, strict: bool) -> Form:
        bound = strict or tool.function.strict
        schema: Any = tool.arguments_schema if bound else {"type": "object"}
        # A schema may say nothing about the type; arguments are an object all the same.
        arguments = {
            "type": "json_schema",
            "json_schema": {"type": "object", **schema},
            "style": tool_format.style,
        }
        before = self._literal(tool_format.call_of(tool.function.name))
        return _sequence([*before, arguments, *self._literal(tool_format.call_end)])

    def _content(self, form: Form) -> Form:
        if not self._formats.is_harmony:
            return form
        begin = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
        return _sequence([*self._literal(begin), form])

    def _tagged(self, form: Form, param: str | None) -> Structure:
        reasoning = self._reasoning()
        whole = form if reasoning is None else _sequence([reasoning, form])
        tag = {"type": "structural_tag", "format": whole}
        return Structure("structural_tag", json.dumps(tag, ensure_ascii=False), param)

    def _reasoning(self) -> Form | None:
        if self._formats.is_harmony:
            begin = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"
            end = f"{harmony.END}{harmony.START}assistant"
            return {"type": "optional", "content": self._between(begin, end, harmony.END)}
        if self._formats.reasoning is None or self._thinking == "over":
            return None
        begin, end = self._formats.reasoning
        if self._thinking == "inside":
            return _sequence([self._between("", end, end), _BLANK])
        content = _sequence([self._between(begin, end, end), _BLANK])
        return {"type": "optional", "content": content}

    def _between(self, begin: str, end: str, excluded: str) -> Form:
        text = {"type": "any_text", "excludes": [excluded]}
        return _sequence([*self._literal(begin), text, *self._literal(end)])

    def _literal(self, text: str) -> list[Form]:
        """This text, its special tokens by their ids: no grammar over text reaches those."""
        forms: list[Form] = []
        while text:
            found = [
                (place, mark, token)
                for mark, token in self._formats.special.items()
                if (place := text.find(mark)) >= 0
            ]
            place, mark, token = min(found) if found else (len(text), "", -1)
            if place:
                forms.append({"type": "const_string", "value": text[:place]})
            if mark:
                forms.append({"type": "token", "token": token})
            text = text[place + len(mark) :]
        return forms


def _sequence(elements: list[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _either(elements: list[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _form_of(structure: Structure) -> Form:
    """A structure that a request asks for, as a part of a larger one. Raises RequestError."""
    try:
        return _parsed_form(structure)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(
            f"expected a structure of kind {structure.kind}, found none: {error}", structure.param
        ) from error


def _parsed_form(structure: Structure) -> Form:
    if structure.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if structure.kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(structure.text)}
    if structure.kind == "regex":
        return {"type": "regex", "pattern": structure.text}
    if structure.kind == "ebnf":
        return {"type": "grammar", "grammar": structure.text}
    if structure.kind == "choice":
        texts = json.loads(structure.text)
        if not (isinstance(texts, list) and texts):
            raise ValueError("expected a list of texts")
        return _either([{"type": "const_string", "value": text} for text in texts])
    return dict(json.loads(structure.text)["format"])
