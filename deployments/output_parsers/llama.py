"""Llama: a whole answer that is JSON calls, or a list of calls as Python writes them."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from deployments.output_parsers.json_call import JsonCall
from deployments.output_parsers.text_machine import TextMachine, undecided

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
MARKS = (PYTHON_TAG, PYTHON_START, PYTHON_END)

_NAME = re.compile(r"\s*([A-Za-z_][\w.-]{0,255})\s*(?=\()")
_NAME_BEGINS = re.compile(r"\s*([A-Za-z_][\w.-]{0,255})?\s*")


class LlamaParser(TextMachine):
    """Both forms; only calls of tools that were offered are calls, as nothing else marks them."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._raw = ""
        self._state = self._opening

    def _opening(self, final: bool) -> bool:
        """What the answer begins with says whether it calls anything."""
        begin = self._text.lstrip()
        opened = self._raw.endswith((PYTHON_TAG, PYTHON_START))
        if not opened:
            for mark in (PYTHON_TAG, PYTHON_START):
                if begin.startswith(mark):
                    self._raw = self._take(len(self._text) - len(begin) + len(mark))
                    return True
            marks = (PYTHON_TAG, PYTHON_START)
            if not final and undecided(begin, marks) == len(begin):
                return False
        if not begin and not final:
            return False
        if begin.startswith("{"):
            self._begin_object(listed=False)
            return True
        if begin.startswith("["):
            self._raw += self._take(self._text.index("[") + 1)
            self._state = self._list_opening
            return True
        return self._give_up()

    def _list_opening(self, final: bool) -> bool:
        begin = self._text.lstrip()
        if not begin and not final:
            return False
        if begin.startswith("{"):
            self._begin_object(listed=True)
            return True
        self._begin_python_call()
        return True

    def _begin_python_call(self) -> None:
        self._extent: PythonExtent | None = None
        self._state = self._python_call

    def _begin_object(self, listed: bool) -> None:
        self._listed = listed
        self._call = JsonCall(self._names)
        self._state = self._object

    def _object(self, final: bool) -> bool:
        news = self._call.read(self._text, final)
        if news.failed:
            return self._give_up()
        if news.name is not None:
            self._start_call(news.name)
        self._add_arguments(news.arguments)
        self._take(news.used)
        if news.ended:
            self._raw = ""
            self._state = self._after_object
        return news.ended

    def _after_object(self, final: bool) -> bool:
        begin = self._text.lstrip()
        if not begin and not final:
            return False
        if begin.startswith("," if self._listed else ";"):
            self._raw = self._take(len(self._text) - len(begin) + 1)
            self._state = self._next_object
            return True
        return self._close_list(begin) if self._listed else self._give_up()

    def _next_object(self, final: bool) -> bool:
        begin = self._text.lstrip()
        if not begin and not final:
            return False
        if not begin.startswith("{"):
            return self._give_up()
        self._begin_object(self._listed)
        return True

    def _python_call(self, final: bool) -> bool:
        """One call, whole: Python's arguments become JSON only when all of them are there."""
        head = _NAME.match(self._text)
        if head is None:
            if not final and _NAME_BEGINS.fullmatch(self._text):
                return False
            return self._give_up()
        if head.group(1) not in self._names:
            return self._give_up()
        if self._extent is None:
            self._extent = PythonExtent(head.end())
        end = self._extent.end(self._text)
        if end is None:
            return self._give_up() if final else False
        arguments = _python_arguments(self._text[head.end() : end])
        if arguments is None:
            return self._give_up()
        self._take(end)
        self._start_call(head.group(1))
        self._add_arguments(arguments)
        self._raw = ""
        self._state = self._after_python_call
        return True

    def _after_python_call(self, final: bool) -> bool:
        begin = self._text.lstrip()
        if not begin and not final:
            return False
        if begin.startswith(","):
            self._raw = self._take(len(self._text) - len(begin) + 1)
            self._begin_python_call()
            return True
        return self._close_list(begin)

    def _close_list(self, begin: str) -> bool:
        if begin.startswith("]"):
            self._text = begin[1:]
            self._state = self._closing_mark
            return True
        return self._give_up()

    def _closing_mark(self, final: bool) -> bool:
        begin = self._text.lstrip()
        if begin.startswith(PYTHON_END):
            self._text = begin[len(PYTHON_END) :]
        elif not final and undecided(begin, (PYTHON_END,)) == len(begin):
            return False
        self._state = self._content
        return True

    def _content(self, final: bool) -> bool:
        self._say(self._take(len(self._text)))
        return False

    def _give_up(self) -> bool:
        """The rest of the answer is content."""
        raw, self._raw = self._raw, ""
        self._say(raw)
        self._state = self._content
        return True


class PythonExtent:
    """Finds the bracket that closes the first one of a growing text, outside of Python's texts."""

    def __init__(self, begin: int) -> None:
        self._place = begin
        self._depth = 0
        self._quote = ""

    def end(self, text: str) -> int | None:
        """Place after that bracket. `text` begins like that of the last call."""
        while self._place < len(text):
            letter = text[self._place]
            if self._quote and letter == "\\":
                if self._place + 1 == len(text):
                    return None
                self._place += 1
            elif self._quote:
                self._quote = "" if letter == self._quote else self._quote
            elif letter in "'\"":
                self._quote = letter
            elif letter in "([{":
                self._depth += 1
            elif letter in ")]}":
                self._depth -= 1
            self._place += 1
            if self._depth == 0 and not self._quote:
                return self._place
        return None


def _python_arguments(text: str) -> str | None:
    """`(a=1, b="x")` as JSON; None where it is nothing but names and plain values."""
    try:
        call = ast.parse("f" + text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = _value(keyword.value)
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    # Whatever a model writes may be too deep, too long or no Python at all.
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """A plain value; JSON's own words for three of them are taken too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key) if key is not None else _refuse(): _value(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    value = ast.literal_eval(node)
    if isinstance(value, bytes | set | complex) or value is ...:
        return _refuse()
    return value


def _refuse() -> Any:
    raise ValueError("no plain value")
