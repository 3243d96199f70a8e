"""gpt-oss through OpenAI's own library, where that is installed and its vocabulary on disk."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deployments.output_parsers.harmony import CHANNEL, MARKS, HarmonyParser
from deployments.output_parsers.parts import Part
from deployments.output_parsers.text_machine import CallId, new_call_id, undecided

log = logging.getLogger("ray.serve")

VOCABULARY_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
VOCABULARY_FILE = "o200k_base.tiktoken"
_WORDS = (CHANNEL, "to=")


def open_encoding() -> Any | None:
    """The library's encoding; None where it is not at hand: the library would fetch it."""
    folder = os.environ.get(VOCABULARY_VARIABLE)
    if not folder or not (Path(folder) / VOCABULARY_FILE).is_file():
        return None
    if find_spec("openai_harmony") is None:
        return None
    import openai_harmony

    try:
        name = openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
        return openai_harmony.load_harmony_encoding(name)
    # A damaged vocabulary is no reason not to serve: the marks can be read without the library.
    except openai_harmony.HarmonyError as error:
        log.warning("openai-harmony is not used: %s", error)
        return None


class HarmonyLibraryParser(HarmonyParser):
    """Messages as the library finds them.

    The library takes tokens; the text is cut into such again. It refuses what is out of order:
    a text without any mark is read without it, and words between two messages are dropped.
    """

    def __init__(self, encoding: Any, names: frozenset[str], call_id: CallId = new_call_id) -> None:
        super().__init__(names, call_id)
        import openai_harmony

        self._harmony = openai_harmony
        self._encoding = encoding
        self._messages = openai_harmony.StreamableParser(
            encoding, role=openai_harmony.Role.ASSISTANT
        )
        (self._channel,) = encoding.encode(CHANNEL, allowed_special="all")
        self._by_library: bool | None = None
        """None until the text's beginning has come."""
        self._inside = False

    def _run(self, final: bool) -> list[Part]:
        if self._by_library is None:
            begin = self._text.lstrip()
            if not final and undecided(begin, _WORDS) == len(begin):
                return []
            self._by_library = begin.startswith(_WORDS)
        if not self._by_library:
            return super()._run(final)
        # A mark is one token: it must not be cut.
        held = 0 if final else undecided(self._text, MARKS)
        text = self._take(len(self._text) - held)
        for token in self._encoding.encode(text, allowed_special="all"):
            self._process(token)
        parts, self._parts = self._parts, []
        return parts

    def _process(self, token: int) -> None:
        try:
            self._messages.process(token)
        except self._harmony.HarmonyError:
            # Models forget the mark of a message now and then, and never that of its channel.
            begins = token == self._channel
            role = self._harmony.Role.ASSISTANT if begins else None
            self._messages = self._harmony.StreamableParser(self._encoding, role=role)
            if begins:
                self._messages.process(token)
        if self._messages.state == self._harmony.StreamState.CONTENT:
            if not self._inside:
                channel, recipient = (
                    self._messages.current_channel,
                    self._messages.current_recipient,
                )
                self._begin_message(channel or "", recipient or "")
            self._inside = True
            self._hear(self._messages.last_content_delta or "")
        elif self._inside:
            self._inside = False
            self._end_message()
