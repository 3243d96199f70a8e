"""Qwen3-Coder and GLM-4.5: calls whose arguments stand each in marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.output_parsers.text_machine import TextMachine

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class XmlStyle:
    """How a family writes a call between the two marks."""

    name: re.Pattern[str]
    name_ends: tuple[str, ...]
    """The text up to one of these, which stays, must match `name`."""
    argument: re.Pattern[str]
    """A whole argument: its name and its value."""
    argument_begin: str
    argument_end: str
    trims_lines: bool
    """Whether one line end at either end of a value is no part of it."""


QWEN_CODER = XmlStyle(
    name=re.compile(r"<function=([^>\s]{1,256})\s{0,9}>"),
    name_ends=(">",),
    argument=re.compile(r"<parameter=([^>\n]{1,256})>(.*?)</parameter>", re.DOTALL),
    argument_begin="<parameter=",
    argument_end="</parameter>",
    trims_lines=True,
)
GLM = XmlStyle(
    name=re.compile(r"([A-Za-z0-9_.-]{1,256})[ \t]{0,9}"),
    name_ends=("\n", "<arg_key>", END),
    argument=re.compile(
        r"<arg_key>(.{1,256}?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
    ),
    argument_begin="<arg_key>",
    argument_end="</arg_value>",
    trims_lines=False,
)


class XmlCallsParser(TextMachine):
    """Calls between marks; each argument is given on when it is complete.

    `schemas` are the parameters of the tools offered by name: they say which values are texts.
    """

    def __init__(self, style: XmlStyle, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._style = style
        self._schemas = schemas

    def _content(self, final: bool) -> bool:
        text, mark = self._take_until((BEGIN,), final)
        self._say(text)
        if mark is not None:
            self._state = self._name
        return mark is not None

    def _name(self, final: bool) -> bool:
        begin = self._text.lstrip()
        blank = len(self._text) - len(begin)
        found = [(begin.find(mark), mark) for mark in self._style.name_ends]
        ends = [place + (mark == ">") for place, mark in found if place >= 0]
        if not ends:
            if not final and len(begin) < 600:
                return False
            return self._give_up()
        head = self._style.name.fullmatch(begin[: min(ends)])
        if head is None:
            return self._give_up()
        self._take(blank + min(ends))
        self._start_call(head.group(1))
        properties = self._schemas.get(head.group(1), {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._given = 0
        self._state = self._arguments
        return True

    def _arguments(self, final: bool) -> bool:
        begin = self._text.lstrip()
        if begin.startswith(self._style.argument_begin):
            end = begin.find(self._style.argument_end)
            if end < 0:
                if final:
                    self._take(len(self._text))
                return False
            end += len(self._style.argument_end)
            found = self._style.argument.fullmatch(begin[:end])
            self._text = begin[end:]
            if found is not None:
                self._give_argument(found.group(1).strip(), found.group(2))
            return True
        # Whatever else stands here says nothing, up to the next argument or the end of the call.
        place = begin.find(END)
        following = begin.find(self._style.argument_begin)
        if following >= 0 and (place < 0 or following < place):
            self._text = begin[following:]
            return True
        if place < 0:
            return False
        self._text = begin[place + len(END) :]
        self._add_arguments("}" if self._given else "{}")
        self._state = self._content
        return True

    def _give_argument(self, name: str, text: str) -> None:
        if self._style.trims_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        value = json.dumps(self._value(name, text), ensure_ascii=False)
        self._add_arguments(f"{', ' if self._given else '{'}{json.dumps(name)}: {value}")
        self._given += 1

    def _value(self, name: str, text: str) -> Any:
        """A text where the schema says text, else the JSON value that it is, else a text."""
        schema = self._properties.get(name)
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "string":
            return text
        try:
            return json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        # Python's words, which models write as often.
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)

    def _give_up(self) -> bool:
        self._say(BEGIN)
        self._state = self._content
        return True


def _refuse(word: str) -> Any:
    raise ValueError(word)
