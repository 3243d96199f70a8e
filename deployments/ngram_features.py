"""Text as a sparse vector: hashed n-grams of characters and of words, in any language.

A polynomial hash of the prefixes (Karp and Rabin 1987) gives the hash of any piece of the text as
a difference of two of them, so that all n-grams of one order are a few operations on one array.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
_Hashes = NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15
"""Odd, so that powers of it can be divided by, modulo 2^64."""
_MIX = np.uint64(0xD6E8FEB86659FD93)
_WORD_STEP = np.uint64(0xA24BAED4963EE407)
_LINE = 0x0A
_SPACE = 0x20
_BMP = 0x10000
_LETTER, _ALONE = 1, 2
_FEW = 16
_MAX_WINDOW = 1 << 16


@dataclass(frozen=True, slots=True)
class NgramFeatures:
    """What is looked at of a text, and which bucket each of its n-grams falls into."""

    seed: int
    buckets: int
    """A power of two."""
    char_orders: tuple[int, ...]
    """Lengths of the pieces, in characters."""
    word_orders: tuple[int, ...]
    """Lengths in words. Scripts without spaces have a word for each character."""
    head_chars: int
    """From the beginning of the text; all that lies between head and tail is not looked at."""
    tail_chars: int

    def __post_init__(self) -> None:
        orders = (*self.char_orders, *self.word_orders)
        if not (
            2 <= self.buckets <= 1 << 24
            and self.buckets & (self.buckets - 1) == 0
            and orders
            and all(1 <= order <= 8 for order in orders)
            and self.head_chars >= 1
            and self.tail_chars >= 0
            and self.head_chars + self.tail_chars <= _MAX_WINDOW
            and 0 <= self.seed < 1 << 63
        ):
            raise ValueError(
                "expected a power of two of buckets up to 2^24, orders from 1 to 8, a head of at "
                f"least 1 character and a window of at most {_MAX_WINDOW}, found {self}"
            )

    def of(self, text: str) -> tuple[IntArray, FloatArray]:
        """The buckets that the text falls into, rising, and their values.

        Together they are of length 1, and shorter for a text of few n-grams, which tells less.
        Any text has a vector, which may be empty: lone surrogates and controls are characters.
        """
        places = self._places(self._codes(text))
        counts = np.bincount(places, minlength=self.buckets)
        ids = np.flatnonzero(counts)
        values: FloatArray = np.sqrt(counts[ids], dtype=np.float32)
        # The squares of the values are the counts.
        values /= np.sqrt(np.float32(places.size + _FEW))
        return ids, values

    def _codes(self, text: str) -> NDArray[np.uint32]:
        """Code points, in lower case, digits as one, between two spaces."""
        if len(text) > self.head_chars + self.tail_chars:
            tail = text[-self.tail_chars :] if self.tail_chars else ""
            text = f"{text[: self.head_chars]}\n{tail}"
        # Lower case may be longer: up to three times, in scripts that hardly anybody writes.
        text = f" {text.lower()[: self.head_chars + self.tail_chars + 1]} "
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").copy()
        codes[(codes <= _SPACE) & (codes != _LINE)] = _SPACE
        codes[(codes >= ord("0")) & (codes <= ord("9"))] = ord("0")
        return codes

    def _places(self, codes: NDArray[np.uint32]) -> IntArray:
        if codes.max() <= _SPACE:
            return np.empty(0, dtype=np.int64)  # blank: the space between nothing says nothing
        powers, inverses = _powers(self.head_chars + self.tail_chars + 4)
        prefixes = np.zeros(codes.size + 1, dtype=np.uint64)
        np.cumsum(codes * powers[: codes.size], out=prefixes[1:])
        hashes = [
            self._bucket(
                (prefixes[order:] - prefixes[:-order]) * inverses[: prefixes.size - order], order
            )
            for order in self.char_orders
            if order < prefixes.size
        ]
        starts, ends = _words(codes)
        words = (prefixes[ends] - prefixes[starts]) * inverses[starts]
        for order in self.word_orders:
            if order <= words.size:
                run = words[: words.size - order + 1]
                for number in range(1, order):
                    run = run * _WORD_STEP + words[number : words.size - order + 1 + number]
                hashes.append(self._bucket(run, order + 16))
        return np.concatenate(hashes).astype(np.int64) if hashes else np.empty(0, dtype=np.int64)

    def _bucket(self, hashes: _Hashes, kind: int) -> _Hashes:
        salt = np.uint64((self.seed * 64 + kind) * 0xBF58476D1CE4E5B9 % (1 << 64))
        mixed = (hashes ^ salt) * _MIX
        mixed ^= mixed >> np.uint64(32)
        mixed *= _MIX
        return mixed >> np.uint64(65 - self.buckets.bit_length())


@cache
def _powers(size: int) -> tuple[_Hashes, _Hashes]:
    """Powers of the base and of its inverse, modulo 2^64."""
    both = np.ones((2, size), dtype=np.uint64)
    for row, base in enumerate((_BASE, pow(_BASE, -1, 1 << 64))):
        both[row, 1:] = base
        np.multiply.accumulate(both[row], out=both[row])
    return both[0], both[1]


def _words(codes: NDArray[np.uint32]) -> tuple[IntArray, IntArray]:
    """First and last-but-one place of each word. The codes begin and end with a space."""
    kinds = _kinds()[np.minimum(codes, _BMP - 1)]
    alone = kinds == _ALONE
    letter = kinds == _LETTER
    starts = alone.copy()
    starts[1:] |= letter[1:] & ~letter[:-1]
    ends = alone
    ends[:-1] |= letter[:-1] & ~letter[1:]
    return np.flatnonzero(starts), np.flatnonzero(ends) + 1


@cache
def _kinds() -> NDArray[np.uint8]:
    """Of each code point: between words, part of one, or a word by itself."""
    kinds = np.zeros(_BMP, dtype=np.uint8)
    for first, last in (("0", "9"), ("a", "z"), ("_", "_"), ("'", "'"), ("\xaa", "\u1fff")):
        kinds[ord(first) : ord(last) + 1] = _LETTER
    for code in (0xAB, 0xB6, 0xB7, 0xBB, 0xBF, 0xD7, 0xF7):
        kinds[code] = 0
    kinds[0x2070:0x2E80] = _ALONE  # signs: currency, arrows, mathematics
    kinds[0x2E80:0x3000] = _ALONE
    kinds[0x3040:0xA4D0] = _ALONE  # kana and ideographs
    kinds[0xA4D0:0xD800] = _LETTER  # Hangul among them, which has spaces
    kinds[0xD800:0xE000] = _ALONE
    kinds[0xE000:0xFF00] = _LETTER
    kinds[0xFF10:0xFFFF] = _LETTER
    kinds[_BMP - 1] = _ALONE  # all that lies beyond: emoji, rare ideographs
    return kinds
