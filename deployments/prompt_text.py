"""A prompt as token ids and, where it is to be echoed, as text with the place of each token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.token_pieces import TokenPieces


@dataclass(frozen=True, slots=True)
class PromptText:
    """One prompt of a request."""

    ids: tuple[int, ...]
    text: str = ""
    """What an echo repeats; empty where none was asked for."""
    offsets: tuple[int, ...] = ()
    """Characters of `text` before each token."""
    is_beginning: bool = False
    """The whole prompt is longer than the context, and these are its first tokens."""

    @classmethod
    def of_ids(cls, pieces: TokenPieces, ids: Seq[int]) -> PromptText:
        """The text of token ids, special tokens by their names.

        The bytes of a character that the last tokens leave unfinished are no text yet.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        parts: list[str] = []
        offsets: list[int] = []
        chars = 0
        strip = pieces.strips_first_space
        for token_id in ids:
            special = pieces.starts_anew(token_id)
            data = pieces.name(token_id).encode() if special else pieces.text(token_id)
            if strip and data and not special:
                data = data.removeprefix(b" ")
            strip = pieces.strips_first_space and special
            offsets.append(chars)
            parts.append(decoder.decode(data))
            chars += len(parts[-1])
        return cls(tuple(ids), "".join(parts), tuple(offsets))
