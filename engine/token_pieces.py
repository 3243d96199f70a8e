"""Which bytes of text each token stands for, read from the tokenizer's own decoder. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from core.errors import CheckpointError

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN_DECODERS = {
    "ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "Sequence",
}  # fmt: skip


class TokenPieces(Protocol):
    """From token id to bytes."""

    def text(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token adds to the text; none for a special token."""

    def starts_anew(self, token_id: int) -> bool:
        """True for a special token: text after it is decoded like a fresh text."""

    def name(self, token_id: int) -> str:
        """The token as log-probabilities name it; a special token by its content."""

    @property
    def strips_first_space(self) -> bool:
        """True where the decoder drops the space before the first word of a text."""


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for each of the 256 bytes (Radford et al. 2019)."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in keep]
    return {chr(byte): byte for byte in keep} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


def decoder_kinds(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The flat list of decoders in tokenizer.json's "decoder"."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for nested in decoder["decoders"] for part in decoder_kinds(nested)]
    return [decoder]


class TokenizerPieces:
    """The pieces of a tokenizer.json: byte-level, SentencePiece-like, or plain words.

    Raises CheckpointError for a decoder whose bytes per token are not known.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        parts = decoder_kinds(decoder)
        kinds = {part["type"] for part in parts}
        if kinds - _KNOWN_DECODERS:
            raise CheckpointError(
                f"expected a tokenizer decoder made of {', '.join(sorted(_KNOWN_DECODERS))}; "
                f"found {', '.join(sorted(kinds - _KNOWN_DECODERS))}. This tokenizer cannot be "
                "streamed token by token."
            )
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._plain_words = not parts
        self._alphabet = byte_alphabet()
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items()}
        self._silent = {token_id for token_id, token in added.items() if token.special}
        self._cache: dict[int, bytes] = {}
        self.strips_first_space = self._plain_words or any(
            (part["type"] == "Strip" and part.get("start")) or part["type"] == "Metaspace"
            for part in parts
        )

    @classmethod
    def open(cls, tokenizer_json: Path, tokenizer: Tokenizer) -> TokenizerPieces:
        """The pieces of `tokenizer`, whose decoder is described in `tokenizer_json`."""
        return cls(tokenizer, json.loads(tokenizer_json.read_bytes()).get("decoder"))

    def text(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token adds to the text; none for a special token."""
        known = self._cache.get(token_id)
        if known is None:
            known = b"" if token_id in self._silent else self._bytes(token_id)
            self._cache[token_id] = known
        return known

    def starts_anew(self, token_id: int) -> bool:
        """True for a special token: text after it is decoded like a fresh text."""
        return token_id in self._silent

    def name(self, token_id: int) -> str:
        """The token as log-probabilities name it; a special token by its content."""
        if token_id in self._silent:
            return self._special[token_id]
        return self.text(token_id).decode("utf-8", errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # a padded row of the vocabulary
        if token_id in self._special:
            return token.encode()
        if self._byte_level:
            letters = [self._alphabet.get(letter) for letter in token]
            return token.encode() if None in letters else bytes(x for x in letters if x is not None)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        if self._plain_words:
            return b" " + token.encode()
        return token.replace(_SPACE_MARK, " ").encode()
