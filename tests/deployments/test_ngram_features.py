"""Hashed n-grams: what a slow reference says, any text, and a bounded look at long ones."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments import ngram_features
from deployments.ngram_features import NgramFeatures

FEATURES = NgramFeatures(
    seed=3, buckets=1 << 12, char_orders=(1, 3), word_orders=(1, 2), head_chars=60, tail_chars=40
)
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=300)
_MASK = (1 << 64) - 1


def reference(features: NgramFeatures, codes: list[int]) -> Counter[int]:
    """Buckets of all n-grams, one at a time and in Python's integers."""

    def hashed(piece: list[int]) -> int:
        base = ngram_features._BASE
        return sum(code * pow(base, place, 1 << 64) for place, code in enumerate(piece)) & _MASK

    def bucket(value: int, kind: int) -> int:
        salt = (features.seed * 64 + kind) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (value ^ salt) * int(ngram_features._MIX) & _MASK
        mixed = (mixed ^ mixed >> 32) * int(ngram_features._MIX) & _MASK
        return mixed >> (65 - features.buckets.bit_length())

    found: Counter[int] = Counter()
    for order in features.char_orders:
        for begin in range(len(codes) - order + 1):
            found[bucket(hashed(codes[begin : begin + order]), order)] += 1
    starts, ends = ngram_features._words(np.array(codes, dtype=np.uint32))
    words = [hashed(codes[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    for order in features.word_orders:
        for begin in range(len(words) - order + 1):
            value = words[begin]
            for word in words[begin + 1 : begin + order]:
                value = (value * int(ngram_features._WORD_STEP) + word) & _MASK
            found[bucket(value, order + 16)] += 1
    return found


@settings(max_examples=60, deadline=None)
@given(ANY_TEXT)
def test_any_text_has_the_vector_that_the_reference_says(text: str) -> None:
    ids, values = FEATURES.of(text)
    codes = FEATURES._codes(text)
    expected = reference(FEATURES, codes.tolist()) if codes.max() > 32 else Counter[int]()
    assert ids.tolist() == sorted(expected)
    total = expected.total() + ngram_features._FEW
    assert np.allclose(values, [(expected[i] / total) ** 0.5 for i in ids.tolist()])
    assert np.isfinite(values).all() and values @ values < 1.0


def words(text: str) -> list[str]:
    codes = FEATURES._codes(text)
    starts, ends = ngram_features._words(codes)
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return ["".join(map(chr, codes[a:b].tolist())) for a, b in pairs]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It's 12 snake_case WORDS, done.", ["it's", "00", "snake_case", "words", "done"]),
        ("我想吃饭", ["我", "想", "吃", "饭"]),
        ("Привет, мир!", ["привет", "мир"]),
        ("전시회가 열렸다", ["전시회가", "열렸다"]),
        ("a😀b", ["a", "😀", "b"]),
        ("\ud800", ["\ud800"]),
        (" \t\0 ", []),
        ("", []),
    ],
)
def test_words_are_those_of_the_script(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_case_and_the_value_of_a_digit_do_not_matter() -> None:
    one, other = FEATURES.of("Order 17 of Pizza"), FEATURES.of("order 93 of pizza")
    assert one[0].tolist() == other[0].tolist()


def test_of_a_long_text_head_and_tail_are_looked_at() -> None:
    head, tail = "begin " * 10, " the end" * 5
    long = FEATURES.of(head + "middle " * 30_000 + tail)
    assert long[0].tolist() == FEATURES.of(head + "\n" + tail)[0].tolist()
    assert long[0].tolist() != FEATURES.of(head + "\n" + " the ENT" * 5)[0].tolist()
    began = time.thread_time()
    for _ in range(50):
        FEATURES.of(head * 100_000)
    assert time.thread_time() - began < 1.0


def test_case_folding_that_lengthens_a_text_stays_within_the_window() -> None:
    assert FEATURES._codes("İ" * 1000).size <= 60 + 40 + 3


def test_seeds_and_orders_give_different_buckets() -> None:
    other = NgramFeatures(4, 1 << 12, (1, 3), (1, 2), 60, 40)
    assert FEATURES.of("some text")[0].tolist() != other.of("some text")[0].tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"buckets": 1000},
        {"buckets": 1 << 25},
        {"char_orders": (), "word_orders": ()},
        {"char_orders": (0,)},
        {"head_chars": 0},
        {"head_chars": 1 << 20},
        {"seed": -1},
    ],
)
def test_sizes_that_cannot_work_are_refused(change: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "seed": 1, "buckets": 16, "char_orders": (2,), "word_orders": (1,), "head_chars": 8,
        "tail_chars": 8,
    }  # fmt: skip
    with pytest.raises(ValueError, match="expected a power of two"):
        NgramFeatures(**{**fields, **change})  # type: ignore[arg-type]
