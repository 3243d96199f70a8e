"""From one sequence's token ids to text: incremental UTF-8, stop strings, held-back ends."""

from __future__ import annotations

import codecs
from collections import deque

import msgspec

from core.step import SequenceOutput, TokenLogprob
from engine.token_pieces import TokenPieces

_CONTINUATION = range(0x80, 0xC0)
_PROMPT_TAIL_TOKENS = 8


class PieceLogprob(msgspec.Struct, frozen=True):
    """A token's text, bytes and natural-log probability, and the likeliest alternatives."""

    token: str
    data: bytes
    logprob: float | None
    """None for a prompt's first token, which nothing comes before."""
    top: tuple[tuple[str, bytes, float], ...] = ()
    token_id: int = -1
    """Told for a prompt's tokens only, as are `top_ids`."""
    top_ids: tuple[int, ...] = ()


def prompt_piece(pieces: TokenPieces, token_id: int, logprob: TokenLogprob | None) -> PieceLogprob:
    """A token of a prompt; the first has no log-probability."""
    top = () if logprob is None else logprob.top
    return PieceLogprob(
        pieces.name(token_id),
        pieces.text(token_id),
        None if logprob is None else logprob.logprob,
        tuple((pieces.name(i), pieces.text(i), p) for i, p in top),
        token_id,
        tuple(i for i, _ in top),
    )


class Detokenizer:
    """Text of one sequence, released as soon as no stop string can begin in it.

    Stop strings are matched on the joined text, whatever the token boundaries: of stops that
    complete at the same token, the one a reader of single characters would meet first wins.
    What is held back is the longest end that may still grow into a stop string (at most its
    length - 1) and the bytes of an unfinished character.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        prompt_ids: tuple[int, ...],
        stop: tuple[str, ...] = (),
        special_text: tuple[int, ...] = (),
    ) -> None:
        """`special_text`: special tokens that stand in the text by their names."""
        self._pieces = pieces
        self._special_text = frozenset(special_text)
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._produced_chars = 0
        self._waiting: deque[tuple[int, int, PieceLogprob]] = deque()
        self._prompt_tail = _unfinished_bytes(pieces, prompt_ids)
        self._strip = pieces.strips_first_space and pieces.starts_anew(prompt_ids[-1])
        self._fresh = True
        self.stopped_by: str | None = None
        """The stop string that ended the text, once one did."""

    def push(
        self, token_id: int, logprob: TokenLogprob | None = None
    ) -> tuple[str, list[PieceLogprob]]:
        """Add one token; the text and log-probabilities that became certain by it.

        After a push that sets `stopped_by`, the text is complete: no push, no flush follows.
        """
        if token_id in self._special_text:
            data = self._pieces.name(token_id).encode()
        else:
            data = self._pieces.text(token_id)
            if self._fresh and data:
                data = self._first(data)
        text = self._decoder.decode(data)
        begin_chars = self._produced_chars
        self._held += text
        self._produced_chars += len(text)
        if logprob is not None:
            piece = self._piece(token_id, logprob)
            # Bytes of an unfinished character wait until it is released.
            unfinished = bool(self._decoder.getstate()[0])
            self._waiting.append((begin_chars, self._produced_chars + unfinished, piece))
        match = self._earliest_stop(len(text))
        if match is not None:
            begin, self.stopped_by = match
            cut_chars = self._produced_chars - len(self._held) + begin
            released, self._held = self._held[:begin], ""
            pieces = [piece for start, _, piece in self._waiting if start < cut_chars]
            self._waiting.clear()
            return released, pieces
        keep = self._undecided()
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(released) :]
        return released, self._ready_pieces()

    def flush(self) -> tuple[str, list[PieceLogprob]]:
        """What was held back, at the end of a sequence that no stop string ended."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        pieces = [piece for _, _, piece in self._waiting]
        self._waiting.clear()
        return text, pieces

    def end(self, output: SequenceOutput) -> PieceLogprob | None:
        """The token that ended the sequence, where its log-probability was asked for."""
        if output.end_token_id is None or output.end_logprob is None:
            return None
        piece = self._piece(output.end_token_id, output.end_logprob)
        return msgspec.structs.replace(piece, data=b"")

    def _first(self, data: bytes) -> bytes:
        self._fresh = False
        if self._strip and data.startswith(b" "):
            return data[1:]
        # A prompt may end inside a character; only a byte that continues it completes it.
        if self._prompt_tail and data[0] in _CONTINUATION:
            return self._prompt_tail + data
        return data

    def _earliest_stop(self, new_chars: int) -> tuple[int, str] | None:
        """(begin, stop) of the match that ends first in the held text; ties: begins first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            # A match must end in the new characters: earlier ones were looked at before.
            begin = self._held.find(stop, max(0, len(self._held) - new_chars - len(stop) + 1))
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
                best = (begin + len(stop), begin, stop)
        return None if best is None else (best[1], best[2])

    def _undecided(self) -> int:
        """Length of the longest end of the held text that some stop string begins with."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _ready_pieces(self) -> list[PieceLogprob]:
        released_chars = self._produced_chars - len(self._held)
        ready = []
        while self._waiting and self._waiting[0][1] <= released_chars:
            ready.append(self._waiting.popleft()[2])
        return ready

    def _piece(self, token_id: int, logprob: TokenLogprob) -> PieceLogprob:
        top = tuple((self._pieces.name(i), self._pieces.text(i), p) for i, p in logprob.top)
        return PieceLogprob(
            self._pieces.name(token_id), self._pieces.text(token_id), logprob.logprob, top
        )


def _unfinished_bytes(pieces: TokenPieces, prompt_ids: tuple[int, ...]) -> bytes:
    """The bytes of a character that the prompt begins and does not finish."""
    data = b"".join(pieces.text(token_id) for token_id in prompt_ids[-_PROMPT_TAIL_TOKENS:])
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead in _CONTINUATION:
            continue
        needed = 2 if lead >> 5 == 0b110 else 3 if lead >> 4 == 0b1110 else 4
        return data[-length:] if lead >= 0xC0 and needed > length else b""
    return b""
