"""DeepSeek V3, R1 and V3.1: calls between marks of full-width bars."""

from __future__ import annotations

import re

from deployments.output_parsers.json_call import JsonExtent
from deployments.output_parsers.text_machine import TextMachine, undecided

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)

_V3_HEAD = re.compile(
    rf"\s{{0,9}}function{re.escape(SEPARATOR)}\s{{0,9}}([^\n{{<]{{1,256}}?)"
    r"\s{0,9}?\n\s{0,9}```(?:json)?\s{0,9}(?=\{)"
)
_V31_HEAD = re.compile(
    rf"\s{{0,9}}([^\n{{<]{{1,256}}?)\s{{0,9}}{re.escape(SEPARATOR)}\s{{0,9}}(?=\{{)"
)
_MAX_HEAD_CHARS = 600


class DeepSeekParser(TextMachine):
    """Content, then calls: `function<sep>name` and a fenced block (V3), or `name<sep>{...}`."""

    def _content(self, final: bool) -> bool:
        text, mark = self._take_until((CALLS, CALL), final)
        self._say(text)
        if mark is None:
            return False
        self._raw = mark
        self._state = self._head if mark == CALL else self._between
        return True

    def _between(self, final: bool) -> bool:
        """After the mark that opens all calls, or after a call."""
        begin = self._text.lstrip()
        for mark in (CALL, CALLS_END):
            if begin.startswith(mark):
                blank = len(self._text) - len(begin)
                self._raw += self._take(blank + len(mark))
                self._state = self._head if mark == CALL else self._content
                return True
        if not final and undecided(begin, (CALL, CALLS_END)) == len(begin):
            return False
        return self._give_up()

    def _head(self, final: bool) -> bool:
        head = _V3_HEAD.match(self._text) or _V31_HEAD.match(self._text)
        if head is not None:
            self._take(head.end())
            self._start_call(head.group(1))
            self._extent = JsonExtent()
            self._state = self._arguments
            return True
        if final or len(self._text) > _MAX_HEAD_CHARS or CALL_END in self._text:
            return self._give_up()
        return False

    def _arguments(self, final: bool) -> bool:
        place, ended = self._extent.scan(self._text, 0, 0)
        self._add_arguments(self._take(place))
        if ended:
            self._state = self._call_end
        return ended

    def _call_end(self, final: bool) -> bool:
        begin = self._text.lstrip().removeprefix("```").lstrip()
        if begin.startswith(CALL_END):
            self._text = begin[len(CALL_END) :]
        elif not final and (begin in ("`", "``") or undecided(begin, (CALL_END,)) == len(begin)):
            return False
        self._raw = ""
        self._state = self._between
        return True

    def _give_up(self) -> bool:
        """What looked like a call is content."""
        self._say(self._raw)
        self._state = self._content
        return True
