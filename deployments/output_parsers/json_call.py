"""One call written as an object, {"name": ..., "arguments": {...}}, read as it comes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""What comes before the arguments where they can be given on while they come."""


_OUTSIDE = frozenset("{}[]:,0123456789+-.eE" + "truefalsn" + " \t\r\n")
"""What a JSON value is made of, outside of its texts."""


class JsonExtent:
    """Finds where a JSON value that begins with a bracket ends: brackets outside of texts."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_text = False
        self._escaped = False

    def scan(self, text: str, begin: int, depth: int) -> tuple[int, bool]:
        """Reads on until the depth falls to `depth` or what is no JSON begins.

        Gives the place reached and whether that is the end, good or bad.
        """
        for place in range(begin, len(text)):
            letter = text[place]
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_text = False
            elif letter == '"':
                self._in_text = True
            elif letter not in _OUTSIDE:
                return place, True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= depth:
                    return place + 1, True
        return len(text), False


@dataclass(slots=True)
class News:
    """What more text made certain."""

    name: str | None = None
    """The call begins."""
    arguments: str = ""
    ended: bool = False
    """The object is complete."""
    failed: bool = False
    """It is no call; nothing was given before."""
    used: int = 0
    """Characters of the text given to `read` that it needs no more."""


@dataclass(slots=True)
class JsonCall:
    """Reads one object from a growing text that begins with it.

    With `names`, other names are no calls. A call whose arguments come after its name is given on
    while it comes, another kind when it is complete.
    """

    names: frozenset[str] | None = None
    _extent: JsonExtent = field(default_factory=JsonExtent)
    _place: int = 0
    _in_arguments: bool = False
    _in_rest: bool = False

    def read(self, text: str, final: bool) -> News:
        """`text` is all that was not used yet."""
        if self._in_rest:
            return self._rest(text)
        if self._in_arguments:
            return self._arguments(text)
        head = _HEAD.match(text)
        if head is None:
            return self._whole(text, final)
        name = _loads(head.group(1))
        if not self._is_name(name):
            return News(failed=True)
        self._extent = JsonExtent(depth=1)
        self._in_arguments = True
        news = self._arguments(text[head.end() :])
        news.name = name
        news.used += head.end()
        return news

    def _arguments(self, text: str) -> News:
        place, ended = self._extent.scan(text, 0, 1)
        news = News(arguments=text[:place], used=place)
        if ended:
            self._in_arguments, self._in_rest = False, True
            rest = self._rest(text[place:])
            news.ended = rest.ended
            news.used += rest.used
        return news

    def _rest(self, text: str) -> News:
        """From the arguments to the end of the object, over members that say nothing."""
        place, ended = self._extent.scan(text, 0, 0)
        return News(ended=ended, used=place)

    def _whole(self, text: str, final: bool) -> News:
        stripped = text.lstrip()
        if not stripped:
            return News(failed=final)
        if stripped[0] != "{":
            return News(failed=True)
        place, ended = self._extent.scan(text, self._place, 0)
        self._place = place
        if not ended:
            return News(failed=final)
        value = _loads(text[:place])
        name = value.get("name") if isinstance(value, dict) else None
        arguments = _arguments_of(value) if self._is_name(name) else None
        if arguments is None:
            return News(failed=True)
        return News(name=name, arguments=arguments, ended=True, used=place)

    def _is_name(self, name: Any) -> bool:
        if not (isinstance(name, str) and name):
            return False
        return self.names is None or name in self.names


def _arguments_of(call: dict[str, Any]) -> str | None:
    value = call.get("arguments", call.get("parameters"))
    if value is None:
        return "{}"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    # Some models write the arguments as a text that holds the object.
    if isinstance(value, str) and isinstance(_loads(value), dict):
        return value
    return None


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
