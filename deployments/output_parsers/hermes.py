"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after another."""

from __future__ import annotations

from deployments.output_parsers.json_call import JsonCall
from deployments.output_parsers.text_machine import TextMachine, undecided

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(TextMachine):
    """Calls between marks, content around them."""

    def _content(self, final: bool) -> bool:
        text, mark = self._take_until((BEGIN,), final)
        self._say(text)
        if mark is None:
            return False
        self._call = JsonCall()
        self._state = self._object
        return True

    def _object(self, final: bool) -> bool:
        news = self._call.read(self._text, final)
        if news.failed:
            self._say(BEGIN)
            self._state = self._content
            return True
        if news.name is not None:
            self._start_call(news.name)
        self._add_arguments(news.arguments)
        self._take(news.used)
        if news.ended:
            self._state = self._end
        return news.ended

    def _end(self, final: bool) -> bool:
        self._skip_blank()
        if self._text.startswith(END):
            self._take(len(END))
        elif not final and undecided(self._text, (END,)) == len(self._text):
            return False
        self._state = self._content
        return True
