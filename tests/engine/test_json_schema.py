"""Schemas a grammar is held to: whatever it lets through is valid; the rest is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from core.errors import RequestError
from core.request import Structure
from engine.grammar_source import compile_source, grammar_source
from engine.json_schema import enforceable
from engine.structure_matcher import MatcherFactory
from engine.vocabulary import Vocabulary
from tests.engine.schema_samples import PUBLIC, random_schema

DEMO = Path(__file__).resolve().parents[2] / "demo_model"
VOCAB = 4096


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    return MatcherFactory(DEMO, VOCAB)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.open(DEMO, VOCAB)


def walk(
    factory: MatcherFactory, vocabulary: Vocabulary, schema: Any, chance: random.Random
) -> str | None:
    """A text that the schema's grammar lets through; None where it does not come to an end."""
    source = grammar_source(Structure("json_schema", json.dumps(schema)), factory.special_texts)
    matcher = factory.matcher(compile_source(factory.compiler, source), source, (2,))
    data = b""
    for step in range(400):
        matcher.look()
        assert matcher.forbidden is not None
        allowed = np.flatnonzero(~matcher.forbidden.numpy()).tolist()
        if matcher.finished or (2 in allowed and chance.random() < 0.5):
            return data.decode()
        ids = [token for token in allowed if token != 2]
        if step > 40:  # come to an end
            ids = [t for t in ids if vocabulary.token_bytes[t][:1] in b'"}]0.'] or ids
        token = chance.choice(ids)
        matcher.accept(token)
        data += vocabulary.token_bytes[token]
    return None


def check(schema: Any, text: str) -> None:
    value = json.loads(text)
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


def test_every_text_of_a_random_schema_is_valid(
    factory: MatcherFactory, vocabulary: Vocabulary
) -> None:
    chance = random.Random(20)
    accepted = finished = refused = 0
    while accepted < 400:
        schema = random_schema(chance)
        try:
            enforceable(schema)
        except RequestError:
            refused += 1
            continue
        accepted += 1
        for _ in range(2):
            text = walk(factory, vocabulary, schema, chance)
            if text is not None:
                finished += 1
                check(schema, text)
    assert finished > 700
    assert 10 < refused < accepted


@pytest.mark.parametrize("number", range(len(PUBLIC)))
def test_every_text_of_a_public_shape_is_valid(
    factory: MatcherFactory, vocabulary: Vocabulary, number: int
) -> None:
    chance = random.Random(number)
    texts = [walk(factory, vocabulary, PUBLIC[number], chance) for _ in range(8)]
    found = [text for text in texts if text is not None]
    assert len(found) > 1
    for text in found:
        check(PUBLIC[number], text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": [{"additionalProperties": False}, {"properties": {"a": {}}}]},
        {"const": 1, "enum": [2]},
        {"type": "string", "enum": [1]},
        {"type": "integer", "minimum": 1.2, "maximum": 1.8},
        {"minProperties": 2},
        {"required": ["a"], "additionalProperties": False, "properties": {}},
        {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"patternProperties": {"^a": {}, "^b": {}}},
        {"type": "string", "pattern": "a^b"},
        {"type": "string", "pattern": "(a$)b"},
        {"type": "string", "pattern": "(a)\\1"},
        {"type": "array", "items": False, "minItems": 1},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}, "type": "null"},
        [],
        None,
    ],
)
def test_what_cannot_be_held_to_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        enforceable(schema)


@pytest.mark.parametrize(
    ("schema", "rewritten"),
    [
        ({"title": "x", "x-extra": 1}, {}),
        (
            {"properties": {"a": {}}},
            {
                "type": "object",
                "properties": {"a": {}},
                "required": [],
                "additionalProperties": False,
            },
        ),
        ({"minLength": 2}, {"type": "string", "minLength": 2}),
        ({"type": ["integer", "number"]}, {"type": "number"}),
        ({"type": "integer", "exclusiveMinimum": 1.5}, {"type": "integer", "minimum": 2}),
        (
            {"minimum": 1, "exclusiveMinimum": True, "type": "integer"},
            {"type": "integer", "minimum": 2},
        ),
        (
            {"items": [{"type": "null"}], "additionalItems": False},
            {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
        ),
        (
            {"allOf": [{"minimum": 1}, {"minimum": 2, "type": "integer"}]},
            {"type": "integer", "minimum": 2},
        ),
        (
            {"anyOf": [{"minLength": 1}, {"maxLength": 9}], "type": "string"},
            {"anyOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 9}]},
        ),
    ],
)
def test_a_schema_says_the_same_in_fewer_words(schema: Any, rewritten: Any) -> None:
    assert enforceable(schema) == rewritten
