from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from core.errors import CheckpointError
from core.step import TokenLogprob
from deployments.detokenizer import Detokenizer
from deployments.model_files import open_pieces
from engine.token_pieces import TokenizerPieces
from tests.serving.tiny_model_folder import make_folder, make_tokenizer

BYTE_LEVEL = TokenizerPieces(make_tokenizer(), {"type": "ByteLevel"})
LOGPROB = TokenLogprob(-1.0)


def run(ids: list[int], stop: tuple[str, ...] = (), prompt: tuple[int, ...] = (65,)) -> list[str]:
    text = Detokenizer(BYTE_LEVEL, prompt, stop)
    parts = []
    for token_id in ids:
        parts.append(text.push(token_id)[0])
        if text.stopped_by is not None:
            return parts
    return [*parts, text.flush()[0]]


@given(st.lists(st.integers(0, 262), max_size=40))
def test_joined_text_is_the_tokenizers_own(ids: list[int]) -> None:
    assert "".join(run(ids)) == make_tokenizer().decode(ids)


def first_match(text: str, stop: tuple[str, ...]) -> str:
    """The reference: read character by character until some stop string is complete."""
    for end in range(len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@settings(max_examples=300)
@given(
    st.text("ab世é", max_size=24),
    st.lists(st.text("ab世é", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_match_like_a_reader_of_characters(text: str, stop: list[str]) -> None:
    parts = run(list(text.encode()), tuple(stop))
    assert "".join(parts) == first_match(text, tuple(stop))


@settings(max_examples=300)
@given(st.text("abc", max_size=20), st.text("abc", min_size=1, max_size=5))
def test_nothing_is_held_back_without_need(text: str, stop: str) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, (65,), (stop,))
    released = ""
    for end, byte in enumerate(text.encode(), start=1):
        released += detokenizer.push(byte)[0]
        if detokenizer.stopped_by is not None:
            return
        held = text[len(released) : end]
        assert stop.startswith(held) and len(held) < len(stop)
        assert not any(stop.startswith(text[begin:end]) for begin in range(len(released)))


@given(st.text("ab世é", max_size=16), st.text("ab世", min_size=1, max_size=3))
def test_logprob_bytes_join_to_the_text_and_what_follows_it(text: str, stop: str) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, (65,), (stop,))
    released, data = "", b""
    for byte in text.encode():
        part, pieces = detokenizer.push(byte, LOGPROB)
        released += part
        data += b"".join(piece.data for piece in pieces)
        if detokenizer.stopped_by is not None:
            assert data == released.encode()
            return
    part, pieces = detokenizer.flush()
    assert data + b"".join(piece.data for piece in pieces) == text.encode()


def test_an_unfinished_character_of_the_prompt_is_completed() -> None:
    prompt = (*b"x", *"世".encode()[:2])
    assert "".join(run([*"世".encode()[2:], 65], prompt=prompt)) == "世A"
    # Nothing of the prompt shows where the answer does not complete the character.
    assert "".join(run([65], prompt=prompt)) == "A"
    assert "".join(run([0x96], prompt=tuple(b"done"))) == "\ufffd"


def test_special_tokens_are_no_text() -> None:
    assert "".join(run([65, 263, 66, 265])) == "AB"
    assert BYTE_LEVEL.name(263) == "<|end|>" and BYTE_LEVEL.text(10_000) == b""


def sentence_piece() -> TokenizerPieces:
    tokens = {"<s>": 0, "▁Hello": 1, "▁world": 2, "<0xE4>": 3, "<0xB8>": 4, "<0x96>": 5, "!": 6}
    tokenizer = Tokenizer(models.BPE(tokens, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    kinds: list[dict[str, object]] = [{"type": "Replace"}, {"type": "ByteFallback"}]
    decoder = {"type": "Sequence", "decoders": [*kinds, {"type": "Strip", "start": 1}]}
    return TokenizerPieces(tokenizer, decoder)


def test_sentence_piece_spaces_depend_on_what_came_before() -> None:
    pieces = sentence_piece()

    def text(prompt: tuple[int, ...], ids: list[int]) -> str:
        detokenizer = Detokenizer(pieces, prompt)
        return "".join(detokenizer.push(i)[0] for i in ids) + detokenizer.flush()[0]

    assert text((1,), [2, 6]) == " world!"
    assert text((0,), [1, 2]) == "Hello world"
    assert text((1,), [3, 4, 5]) == "世"


def test_a_decoder_of_unknown_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="WordPiece"):
        TokenizerPieces(make_tokenizer(), {"type": "WordPiece"})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_pieces(tmp_path)
    assert open_pieces(make_folder(tmp_path)).text(257) == b"DEF"[:3]
