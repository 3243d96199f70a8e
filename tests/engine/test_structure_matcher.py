"""Masks over vocabularies of every kind: padded, byte-level, with a fallback to bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from core.errors import RequestError
from core.request import Structure
from engine.grammar_source import compile_source, grammar_source
from engine.structure_matcher import MatcherFactory, StructureMatcher
from engine.vocabulary import Vocabulary
from tests.serving.tiny_model_folder import make_folder

PADDED = 320
"""More ids than the tiny tokenizer has tokens (267)."""
END = 263
HI, WHOLE = 259, 260
"""In the vocabulary with a fallback to bytes: " hi" and "é"."""


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> MatcherFactory:
    return MatcherFactory(make_folder(tmp_path_factory.mktemp("tiny") / "model"), PADDED)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> MatcherFactory:
    folder = tmp_path_factory.mktemp("sentencepiece")
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581hi", "é"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in tokens[:2]])
    tokenizer.save(str(folder / "tokenizer.json"))
    return MatcherFactory(folder, len(tokens))


def matcher(factory: MatcherFactory, kind: str, text: str, end: int) -> StructureMatcher:
    source = grammar_source(Structure(kind, text), factory.special_texts)  # type: ignore[arg-type]
    found = factory.matcher(compile_source(factory.compiler, source), source, [end])
    found.look()
    return found


def allowed(found: StructureMatcher) -> set[int]:
    assert found.forbidden is not None
    return set(np.flatnonzero(~found.forbidden.numpy()).tolist())


def test_rows_that_are_padding_and_special_tokens_are_never_allowed(
    byte_level: MatcherFactory,
) -> None:
    found = matcher(byte_level, "regex", "[\\s\\S]*", END)
    assert max(allowed(found) - {END}) < 263
    assert END in allowed(found)
    assert found.forbidden is not None and len(found.forbidden) == PADDED


def test_characters_may_be_made_of_bytes(byte_level: MatcherFactory) -> None:
    found = matcher(byte_level, "regex", "世|丗", END)
    for byte in "世".encode():
        assert byte in allowed(found) and not found.finished
        found.accept(byte)
        found.look()
    assert allowed(found) == {END} and found.finished


def test_no_byte_makes_a_surrogate(byte_level: MatcherFactory) -> None:
    found = matcher(byte_level, "regex", ".*", END)
    found.accept(0xED)
    found.look()
    assert allowed(found) == set(range(0x80, 0xA0))


def test_a_vocabulary_with_a_fallback_to_bytes(byte_fallback: MatcherFactory) -> None:
    found = matcher(byte_fallback, "choice", '["é hi"]', 1)
    assert allowed(found) == {2 + 0xC3, WHOLE}
    found.accept(2 + 0xC3)
    found.look()
    assert allowed(found) == {2 + 0xA9}
    found.accept(2 + 0xA9)
    found.look()
    assert HI in allowed(found)
    found.accept(HI)
    found.look()
    assert allowed(found) == {1} and found.finished


def test_a_structure_that_no_token_can_begin_is_refused(byte_level: MatcherFactory) -> None:
    source = grammar_source(Structure("ebnf", "root ::= root"), byte_level.special_texts)
    with pytest.raises(RequestError, match="vocabulary"):
        byte_level.check_start(compile_source(byte_level.compiler, source), source)


def test_special_tokens_have_bytes_that_no_text_has(tmp_path: Path) -> None:
    vocabulary = Vocabulary.open(make_folder(tmp_path / "model"), PADDED)
    assert set(vocabulary.special) == {263, 264, 265, 266}
    for token in vocabulary.special:
        with pytest.raises(UnicodeDecodeError):
            vocabulary.token_bytes[token].decode()
    assert vocabulary.token_bytes[267:] == (b"",) * (PADDED - 267)


CONST = {"type": "const_string", "value": "a"}
LEGACY = [{"begin": "<a>", "schema": {"not": {}}, "end": "</a>"}]


def tag_of(form: Any) -> Structure:
    return Structure("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {"not": {}}}, "schema.not"),
        ({"json_schema": {"not": {}}}, "type"),
        ({"type": "json", "json_schema": {"type": "string"}}, "type"),
        ({"type": ["json_schema"], "json_schema": {"not": {}}}, "type"),
        ({"type": "tag", "begin": "<", "content": {"json_schema": {}}, "end": ">"}, "type"),
        ({"type": "dispatch", "rules": [["a", {"json_schema": {"not": {}}}]]}, "type"),
        ({"type": "grammar", "syntax": "lark", "grammar": 'start: %json {"not": {}}'}, "EBNF"),
    ],
)
def test_no_schema_passes_in_a_structural_tag_unchecked(form: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        grammar_source(tag_of(form), ())


@pytest.mark.parametrize(
    "tag", [[CONST], {"format": CONST}, {"type": "structural_tag", "structures": LEGACY}]
)
def test_a_structural_tag_of_another_form_is_refused(tag: Any) -> None:
    with pytest.raises(RequestError, match="structural tag"):
        grammar_source(Structure("structural_tag", json.dumps(tag)), ())


def test_every_known_part_of_a_structural_tag_is_taken(byte_level: MatcherFactory) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    begun = {"type": "tag", "begin": "<a>", "content": CONST, "end": ["x", "y"]}
    by_token = {**begun, "begin": {"type": "token", "token": 264}}
    forms: list[dict[str, Any]] = [
        CONST,
        {"type": "json_schema", "json_schema": schema},
        {"type": "qwen_xml_parameter", "json_schema": schema},
        {"type": "any_text"},
        {"type": "any_tokens"},
        {"type": "exclude_token", "exclude_tokens": [3]},
        {"type": "grammar", "grammar": 'root ::= "a"'},
        {"type": "regex", "pattern": "a"},
        {"type": "sequence", "elements": [CONST, {"type": "or", "elements": [CONST, begun]}]},
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [begun]},
        {"type": "token_triggered_tags", "trigger_tokens": [264], "tags": [by_token]},
        {"type": "tags_with_separator", "tags": [begun], "separator": ","},
        {"type": "optional", "content": CONST},
        {"type": "plus", "content": CONST},
        {"type": "star", "content": CONST},
        {"type": "repeat", "min": 1, "max": 2, "content": CONST},
        {"type": "dispatch", "rules": [["b", CONST]]},
        {"type": "token_dispatch", "rules": [[264, CONST]]},
    ]
    for form in forms:
        source = grammar_source(tag_of(form), byte_level.special_texts)
        compile_source(byte_level.compiler, source)
        free = form["type"] in ("qwen_xml_parameter", "any_text", "any_tokens", "dispatch")
        assert not (free and source.is_json), form
