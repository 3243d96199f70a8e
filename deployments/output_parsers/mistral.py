"""Mistral: [TOOL_CALLS] and a list of calls, or from v11 on [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re
import secrets

from deployments.output_parsers.json_call import JsonCall, JsonExtent
from deployments.output_parsers.text_machine import CallId, TextMachine

BEGIN = "[TOOL_CALLS]"
MARKS = (BEGIN, "[ARGS]", "[CALL_ID]")
_NAMED = re.compile(
    r"\s*([A-Za-z0-9_.-]{1,256})\s*(?:\[CALL_ID\][^\[{]{0,64})?(?:\[ARGS\])?\s*(?=\{)"
)
_NAMED_BEGINS = re.compile(
    r"\s*[A-Za-z0-9_.-]{0,256}\s*"
    r"(?:\[(?:C(?:A(?:L(?:L(?:_(?:I(?:D(?:\][^\[{]{0,64})?)?)?)?)?)?)?)?)?"
    r"(?:\[(?:A(?:R(?:G(?:S(?:\])?)?)?)?)?)?\s*"
)


def new_call_id() -> str:
    """Mistral's templates take nothing but nine letters and digits."""
    return secrets.token_hex(5)[:9]


class MistralParser(TextMachine):
    """Content, then calls in either form."""

    def __init__(self, call_id: CallId = new_call_id) -> None:
        super().__init__(call_id)

    def _content(self, final: bool) -> bool:
        text, mark = self._take_until((BEGIN,), final)
        self._say(text)
        if mark is not None:
            self._state = self._form
        return mark is not None

    def _form(self, final: bool) -> bool:
        """Which of the two forms it is."""
        begin = self._text.lstrip()
        if not begin and not final:
            return False
        if begin.startswith("["):
            self._begin_item(BEGIN + self._take(self._text.index("[") + 1))
            return True
        named = _NAMED.match(self._text)
        if named is not None:
            self._take(named.end())
            self._start_call(named.group(1))
            self._extent = JsonExtent()
            self._state = self._arguments
            return True
        if not final and _NAMED_BEGINS.fullmatch(self._text):
            return False
        return self._give_up(BEGIN)

    def _arguments(self, final: bool) -> bool:
        place, ended = self._extent.scan(self._text, 0, 0)
        self._add_arguments(self._take(place))
        if ended:
            self._state = self._content
        return ended

    def _begin_item(self, raw: str) -> None:
        self._raw = raw
        self._call = JsonCall()
        self._state = self._item

    def _item(self, final: bool) -> bool:
        news = self._call.read(self._text, final)
        if news.failed:
            return self._give_up(self._raw)
        if news.name is not None:
            self._start_call(news.name)
        self._add_arguments(news.arguments)
        self._take(news.used)
        if news.ended:
            self._state = self._after_item
        return news.ended

    def _after_item(self, final: bool) -> bool:
        self._skip_blank()
        if not self._text and not final:
            return False
        if self._text.startswith(","):
            self._begin_item(self._take(1))
            return True
        if self._text.startswith("]"):
            self._take(1)
        self._state = self._content
        return True

    def _give_up(self, raw: str) -> bool:
        """What looked like a call is content."""
        self._say(raw)
        self._state = self._content
        return True
