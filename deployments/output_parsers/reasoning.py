"""Reasoning between two marks at the beginning of an answer, and what follows it."""

from __future__ import annotations

from deployments.output_parsers.parts import ContentPart, OutputParser, Part, ReasoningPart
from deployments.output_parsers.text_machine import TextMachine, undecided


class PlainParser(TextMachine):
    """All text is content."""

    def _content(self, final: bool) -> bool:
        if self._text:
            self._parts.append(ContentPart(self._take(len(self._text))))
        return False


class ReasoningParser:
    """Reasoning where the text begins with the mark, or where the prompt has opened it already.

    White space next to the marks belongs to neither side. What follows goes to the parser `inner`.
    """

    def __init__(self, begin: str, end: str, opened: bool, inner: OutputParser) -> None:
        self._begin, self._end = begin, end
        self._inner = inner
        self._text = ""
        self._inside = opened
        self._undecided = True
        """Whether only white space or a part of the opening mark has come."""
        self._started = False
        self._blank = ""
        self._passed = False
        self._trim = False

    def push(self, text: str) -> list[Part]:
        """The parts that became certain by more text."""
        if self._passed:
            return self._pass(text)
        self._text += text
        return self._read(False)

    def finish(self) -> list[Part]:
        """What was held back; white space at the end of unfinished reasoning is dropped."""
        parts = [] if self._passed else self._read(True)
        return parts + self._inner.finish()

    def _read(self, final: bool) -> list[Part]:
        if self._undecided:
            text = self._text.lstrip()
            if text.startswith(self._begin):
                # A model may repeat the mark that its prompt ends with.
                self._inside = True
                self._text = text[len(self._begin) :]
            elif not final and undecided(text, (self._begin,)) == len(text):
                return []
            elif not self._inside:
                return self._pass_on()
            self._undecided = False
        place = self._text.find(self._end)
        if place < 0:
            held = 0 if final else undecided(self._text, (self._end,))
            text = self._text[: len(self._text) - held]
            self._text = self._text[len(text) :]
            return self._reasoning(text)
        parts = self._reasoning(self._text[:place])
        self._text = self._text[place + len(self._end) :]
        self._trim = True
        return parts + self._pass_on()

    def _reasoning(self, text: str) -> list[Part]:
        """White space waits until more reasoning follows it; at the beginning it is dropped."""
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if not self._started:
            kept = kept.lstrip()
            self._blank = self._blank if kept else ""
            self._started = bool(kept)
        return [ReasoningPart(kept)] if kept else []

    def _pass_on(self) -> list[Part]:
        self._passed = True
        text, self._text = self._text, ""
        return self._pass(text)

    def _pass(self, text: str) -> list[Part]:
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return self._inner.push(text) if text else []
