"""The bytes of every id of a model's vocabulary, as grammars and masks read them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from core.errors import CheckpointError
from engine.token_pieces import TokenizerPieces

_WHITE = frozenset(b"\n")
"""Control characters that may stand between the values of a JSON text and never inside one."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """One entry an id that the model can give."""

    token_bytes: tuple[bytes, ...]
    """What each id adds to the text; nothing for rows that are padding. A special token has bytes
    that no UTF-8 text holds, so that a grammar reaches it by its id alone."""
    special: dict[int, str]
    """The special tokens' names."""

    @classmethod
    def open(cls, model_dir: Path, size: int) -> Vocabulary:
        """That of a model folder, from the bytes that the answers' text is made of.

        Raises CheckpointError where there is no tokenizer, or one whose tokens have no bytes.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"expected a tokenizer.json in {model_dir}, found none; structures need one."
            )
        pieces = TokenizerPieces.open(path, Tokenizer.from_file(str(path)))
        special = {token: pieces.name(token) for token in range(size) if pieces.starts_anew(token)}
        return cls(
            tuple(
                b"\xff%d" % token if token in special else pieces.text(token)
                for token in range(size)
            ),
            special,
        )

    def control_ids(self) -> list[int]:
        """Ids that no JSON text needs: with control characters other than a line's end."""
        return [
            token_id
            for token_id, data in enumerate(self.token_bytes)
            if any(byte < 0x20 and byte not in _WHITE for byte in data)
        ]
