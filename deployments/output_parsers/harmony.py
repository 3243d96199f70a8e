"""gpt-oss: messages in channels, by the model's own special tokens (OpenAI's harmony format)."""

from __future__ import annotations

import re

from deployments.output_parsers.parts import Part, ReasoningPart
from deployments.output_parsers.text_machine import CallId, TextMachine, new_call_id, undecided

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_ENDS = (END, RETURN, CALL, START, CHANNEL)


class HarmonyParser(TextMachine):
    """Final text and preambles are content, analysis is reasoning, messages to functions are calls.

    The prompt ends with "<|start|>assistant", so that the text begins inside of a header.
    """

    def __init__(self, names: frozenset[str], call_id: CallId = new_call_id) -> None:
        """`names`: the tools that were offered; without any, nothing is a call."""
        super().__init__(call_id)
        self._names = names
        self._kind = "content"
        self._started = False
        """Whether the mark of a message came in the text, not in the prompt."""
        self._bare = True
        self._state = self._header

    def _header(self, final: bool) -> bool:
        """Role, channel and recipient; a text that has no marks at all is content."""
        begin = self._text.lstrip()
        if not begin:
            return False
        words = (CHANNEL, START, "to=")
        begins = begin.startswith(words)
        if not (begins or self._started):
            if not final and undecided(begin, words) == len(begin):
                return False
            self._kind = "content"
            self._state = self._body
            return True
        place = self._text.find(MESSAGE)
        if place < 0:
            if final and (self._started or CHANNEL in begin or START in begin):
                # An answer cut in a header has nothing more to say.
                self._take(len(self._text))
            elif final:
                self._say(self._take(len(self._text)))
            return False
        header = self._take(place)
        self._take(len(MESSAGE))
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL_NAME.search(header)
        self._begin_message(
            channel.group(1) if channel is not None else "",
            recipient.group(1) if recipient is not None else "",
        )
        self._state = self._body
        return True

    def _begin_message(self, channel: str, recipient: str) -> None:
        name = recipient.removeprefix("functions.")
        # Models forget the prefix now and then.
        if name and self._names and (name != recipient or name in self._names):
            self._start_call(name)
            self._bare = True
            self._kind = "arguments"
        else:
            # A message to a tool of the model's own that is not there is nothing for the reader.
            self._kind = "reasoning" if channel == "analysis" or recipient else "content"

    def _body(self, final: bool) -> bool:
        text, mark = self._take_until(_ENDS, final)
        self._hear(text)
        if mark is not None:
            self._end_message()
            self._follow(mark)
        return mark is not None

    def _hear(self, text: str) -> None:
        """More of the message's body."""
        if self._kind == "arguments":
            self._bare = self._bare and not text.strip()
            self._add_arguments(text)
        elif self._kind == "reasoning":
            self._reason(text)
        else:
            self._say(text)

    def _end_message(self) -> None:
        if self._kind == "arguments" and self._bare:
            self._add_arguments("{}")
        self._kind = "content"

    def _between(self, final: bool) -> bool:
        """After a message: the next one begins, or nothing follows."""
        _, mark = self._take_until((START, CHANNEL), final)
        if mark is not None:
            self._follow(mark)
        return mark is not None

    def _follow(self, mark: str) -> None:
        self._started = mark in (START, CHANNEL)
        if mark == CHANNEL:
            self._text = CHANNEL + self._text
        self._state = self._header if self._started else self._between

    def _reason(self, text: str) -> None:
        last: Part | None = self._parts[-1] if self._parts else None
        if not text:
            return
        if isinstance(last, ReasoningPart):
            self._parts[-1] = ReasoningPart(last.text + text)
        else:
            self._parts.append(ReasoningPart(text))

    def _content(self, final: bool) -> bool:
        return self._body(final)
