"""What the parsers share: a text that grows, states that consume it, parts that come of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from deployments.output_parsers.parts import (
    ContentPart,
    Part,
    ToolCallArguments,
    ToolCallStart,
)

CallId = Callable[[], str]
State = Callable[[bool], bool]
"""Consumes what is certain; told whether the text has ended. False: it needs more text."""


def new_call_id() -> str:
    """An id as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


def first_mark(text: str, marks: tuple[str, ...]) -> tuple[int, str] | None:
    """The mark that begins first in the text; of two at one place, the longer."""
    found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    if not found:
        return None
    begin, _, mark = min(found)
    return begin, mark


def undecided(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of the text with which some mark begins."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


class TextMachine:
    """Runs one state after another over what came, and never depends on how it was split.

    A state consumes only what no later text can change the meaning of. Content next to a call
    loses the white space towards it.
    """

    def __init__(self, call_id: CallId = new_call_id) -> None:
        self._call_id = call_id
        self._text = ""
        """What came and was not consumed."""
        self._parts: list[Part] = []
        self._calls = 0
        self._blank = ""
        self._after_call = False
        self._state: State = self._content

    def push(self, text: str) -> list[Part]:
        """The parts that became certain by more text."""
        self._text += text
        return self._run(False)

    def finish(self) -> list[Part]:
        """What was held back, at the end of the text."""
        parts = self._run(True)
        if self._blank:
            parts.append(ContentPart(self._blank))
        self._blank = ""
        return parts

    def _content(self, final: bool) -> bool:
        raise NotImplementedError

    def _run(self, final: bool) -> list[Part]:
        while self._state(final):
            pass
        parts, self._parts = self._parts, []
        return parts

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _take_until(self, marks: tuple[str, ...], final: bool) -> tuple[str, str | None]:
        """Text that belongs to no mark, and the mark after it where one is there."""
        found = first_mark(self._text, marks)
        if found is not None:
            begin, mark = found
            before = self._take(begin)
            self._take(len(mark))
            return before, mark
        held = 0 if final else undecided(self._text, marks)
        return self._take(len(self._text) - held), None

    def _skip_blank(self) -> None:
        self._text = self._text.lstrip()

    def _say(self, text: str) -> None:
        """Content; white space waits until it is known not to stand before a call."""
        if self._after_call:
            text = text.lstrip()
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._after_call = False
            self._add(ContentPart(kept))

    def _start_call(self, name: str) -> None:
        self._blank = ""
        self._after_call = True
        self._parts.append(ToolCallStart(self._calls, self._call_id(), name))
        self._calls += 1

    def _add_arguments(self, text: str) -> None:
        """More of the arguments of the call that was started last."""
        if text:
            self._add(ToolCallArguments(self._calls - 1, text))

    def _add(self, part: ContentPart | ToolCallArguments) -> None:
        """The part, joined to the last one where that goes on with the same."""
        last = self._parts[-1] if self._parts else None
        if isinstance(part, ContentPart) and isinstance(last, ContentPart):
            self._parts[-1] = ContentPart(last.text + part.text)
        elif isinstance(part, ToolCallArguments) and isinstance(last, ToolCallArguments):
            self._parts[-1] = ToolCallArguments(part.call, last.text + part.text)
        else:
            self._parts.append(part)
