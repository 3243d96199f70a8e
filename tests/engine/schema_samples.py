"""JSON schemas to hold answers to: seeded random ones, and shapes that public schemas have."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("id", "name", "tags", "café", "a b", "kind", "next", 'quo"te', "value", "世")
PATTERNS = ("^[a-z]{2,5}$", "ab?c", "^(red|green)-[0-9]+$", "^\\d{3}$", "^[^a-c]{1,4}$", "^.{1,3}$")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "uri", "color")

PUBLIC: tuple[dict[str, Any], ...] = (
    # A function's arguments, as agents send them.
    {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "City and country"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        },
        "required": ["location"],
        "additionalProperties": False,
    },
    # What pydantic writes for a model with an optional field and a nested model.
    {
        "$defs": {
            "Address": {
                "properties": {
                    "street": {"title": "Street", "type": "string", "maxLength": 12},
                    "zip": {"pattern": "^[0-9]{5}$", "title": "Zip", "type": "string"},
                },
                "required": ["street", "zip"],
                "title": "Address",
                "type": "object",
            }
        },
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 10},
            "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "address": {"$ref": "#/$defs/Address"},
        },
        "required": ["name", "age", "address"],
        "title": "Person",
        "type": "object",
    },
    # A linked list and a tree: recursion.
    {
        "definitions": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"oneOf": [{"$ref": "#/definitions/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
            }
        },
        "$ref": "#/definitions/node",
    },
    {
        "type": "object",
        "properties": {
            "label": {"type": "string", "maxLength": 4},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["label", "children"],
        "additionalProperties": False,
    },
    # A tagged union with a constant in each branch.
    {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}},
                "required": ["kind", "r"],
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "point"}, "xy": {"$ref": "#/$defs/xy"}},
                "required": ["kind", "xy"],
            },
        ],
        "$defs": {
            "xy": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "integer"}],
                "items": False,
                "minItems": 2,
            }
        },
    },
    # GeoJSON's point, draft 7.
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "GeoJSON Point",
        "type": "object",
        "required": ["type", "coordinates"],
        "properties": {
            "type": {"type": "string", "enum": ["Point"]},
            "coordinates": {
                "type": "array",
                "minItems": 2,
                "maxItems": 2,
                "items": {"type": "number", "minimum": -180, "maximum": 180},
            },
        },
    },
    # A package manifest's maps.
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,9}$"},
            "version": {"type": "string", "pattern": "^[0-9]+\\.[0-9]+\\.[0-9]+$"},
            "private": {"type": "boolean"},
            "scripts": {
                "type": "object",
                "additionalProperties": {"type": "string", "maxLength": 6},
                "maxProperties": 2,
            },
        },
        "required": ["name", "version"],
    },
    # Inheritance by allOf.
    {
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"size": {"enum": [1, 2.5, "big"]}}}],
        "required": ["id", "size"],
        "$defs": {"base": {"type": "object", "properties": {"id": {"type": "integer"}}}},
    },
    {"type": "array", "items": {"enum": ["low", "mid", "high"]}, "minItems": 1, "maxItems": 3},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": "object", "patternProperties": {"^x-[a-z]$": {"type": "boolean"}}},
    {"type": "object"},
    {"enum": ["yes", 'with "quotes"', "line\nend", None, 1.5, {"a": [1]}]},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"const": {"fixed": True}},
)


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of modest size; about one in ten asks for what cannot be held to."""
    leaves = [_string, _integer, _number, _plain, _enum]
    makers = leaves if depth >= 3 else [*leaves, _object, _object, _object, _array, _array, _any_of]
    schema = chance.choice(makers)(chance, depth)
    if depth == 0 and chance.random() < 0.2:
        return {"$defs": {"it": schema}, "$ref": "#/$defs/it", "title": "A title"}
    return schema


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"type": "string", "pattern": chance.choice(PATTERNS)}
    if chance.random() < 0.2:
        return {"type": "string", "format": chance.choice(FORMATS)}
    least = chance.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(8)}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.15:
        return {"type": "integer", "multipleOf": chance.randint(1, 12)}
    least = chance.randint(-1500, 1000)
    schema = {"type": "integer", "minimum": least, "maximum": least + chance.randrange(2000)}
    if chance.random() < 0.3:
        schema["exclusiveMinimum"] = schema.pop("minimum") - chance.random()
    return schema


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    least = round(chance.uniform(-50, 50), chance.randrange(4))
    key = chance.choice(("maximum", "exclusiveMaximum"))
    return {"type": "number", "minimum": least, key: round(least + chance.uniform(0.5, 90), 2)}


def _plain(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"], "boolean"])}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = ["a", "b c", "é", 1, -2.5, True, None, "x\ty", ["l", 1], {"k": "v"}]
    return {"enum": chance.sample(values, chance.randint(1, 4))}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(chance, depth + 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
    }
    if chance.random() < 0.4:
        schema["additionalProperties"] = chance.choice([False, False, {"type": "integer"}])
    if chance.random() < 0.1:
        schema["minProperties"] = 1
    if chance.random() < 0.1:
        schema["dependentRequired"] = {names[0]: [names[-1]]}  # cannot be held to
    return schema


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.25:
        parts = [random_schema(chance, depth + 1) for _ in range(chance.randint(1, 2))]
        return {"type": "array", "prefixItems": parts, "items": False}
    least = chance.randrange(2)
    schema = {"type": "array", "items": random_schema(chance, depth + 1), "minItems": least}
    schema["maxItems"] = least + chance.randint(1, 2)
    if chance.random() < 0.1:
        schema["uniqueItems"] = True  # cannot be held to
    return schema


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    key = chance.choice(["anyOf", "anyOf", "oneOf"])
    return {key: [random_schema(chance, depth + 1) for _ in range(2)]}
