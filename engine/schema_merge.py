"""Schemas that must hold together, as one; and whether several exclude each other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from core.errors import RequestError

Plain = Callable[[Any, str], dict[str, Any]]

_LARGER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
_SMALLER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
_ITEMS = {"items", "prefixItems", "additionalItems"}
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}


def merge(one: Any, other: Any, path: str) -> dict[str, Any]:
    """The schema that holds where both do. Raises RequestError where that is not expressible."""
    one, other = (_with_enum({} if part is True else part, path) for part in (one, other))
    for about, names in (("items", _ITEMS), ("properties", _OPEN)):
        mine, theirs = one.keys() & names, other.keys() & names
        closes = about == "items" or one.get("properties") != other.get("properties")
        touched = (mine and (theirs or "properties" in other)) or (theirs and "properties" in one)
        if closes and touched and any(one.get(key) != other.get(key) for key in mine | theirs):
            raise _refusal(path, about, "one schema that says everything about them")
    found = dict(one)
    for key, value in other.items():
        if key not in found or found[key] == value:
            found[key] = value
        else:
            found[key] = _both(key, found[key], value, path)
    return found


def disjoint(schemas: list[dict[str, Any]], plain: Plain, path: str) -> bool:
    """Whether no value is valid under two of them, as far as their words show it."""
    return all(
        _exclude(one, other, plain, path) for one, other in itertools.combinations(schemas, 2)
    )


def _both(key: str, one: Any, other: Any, path: str) -> Any:
    numbers = all(type(value) in (int, float) for value in (one, other))
    if key in _LARGER and numbers:
        return max(one, other)
    if key in _SMALLER and numbers:
        return min(one, other)
    if key == "required" and isinstance(one, list) and isinstance(other, list):
        return one + [name for name in other if name not in one]
    if key == "properties" and isinstance(one, dict) and isinstance(other, dict):
        return {
            name: merge(one[name], other[name], f"{path}.{name[:60]}")
            if name in one and name in other
            else (one[name] if name in one else other[name])
            for name in [*one, *(name for name in other if name not in one)]
        }
    if key == "enum" and isinstance(one, list) and isinstance(other, list):
        known = {_text(value) for value in other}
        return [value for value in one if _text(value) in known]
    if key == "type":
        first, second = _type_set(one), _type_set(other)
        common = first & second
        if "integer" in first | second and "number" in first ^ second:
            common |= {"integer"}
        if common:
            return sorted(common)
    raise _refusal(path, key, "schemas that do not both name it")


def _exclude(one: dict[str, Any], other: dict[str, Any], plain: Plain, path: str) -> bool:
    kinds = [_kinds(schema) for schema in (one, other)]
    if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
        return True
    if "enum" in one and "enum" in other:
        texts = [{_text(value) for value in schema["enum"]} for schema in (one, other)]
        return not texts[0] & texts[1]
    if kinds != [{"object"}, {"object"}]:
        return False
    return _keys_exclude(one, other, plain, path) or _keys_exclude(other, one, plain, path)


def _keys_exclude(one: dict[str, Any], other: dict[str, Any], plain: Plain, path: str) -> bool:
    """Whether a property that `one` requires can never be as `other` has it."""
    theirs = other.get("properties") or {}
    mine = one.get("properties") or {}
    for name in one.get("required") or ():
        if name not in theirs:
            if other.get("additionalProperties") is False and "patternProperties" not in other:
                return True
        elif name in mine and name in (other.get("required") or ()):
            first, second = (_with_enum(plain(part[name], path), path) for part in (mine, theirs))
            if "enum" in first and "enum" in second and _exclude(first, second, plain, path):
                return True
    return False


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Types of its values, a whole number being a number; empty where its words do not tell."""
    if isinstance(schema.get("enum"), list):
        names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
        return {
            "null" if value is None else names.get(type(value), "object")
            for value in schema["enum"]
        }
    return {"number" if kind == "integer" else kind for kind in _type_set(schema.get("type"))}


def _type_set(value: Any) -> set[str]:
    kinds = value if isinstance(value, list) else [value]
    return {kind for kind in kinds if isinstance(kind, str)}


def _with_enum(schema: Any, path: str) -> dict[str, Any]:
    """The schema with `const` as an enum of one value."""
    if not isinstance(schema, dict):
        raise _refusal(path, "", "a schema that some value can meet: an object or true")
    if "const" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "const"}
    if "enum" in rest and _text(schema["const"]) not in {_text(value) for value in rest["enum"]}:
        raise _refusal(path, "const", "one of the values of enum")
    return {**rest, "enum": [schema["const"]]}


def _text(value: Any) -> str:
    """One text for equal JSON values; 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _refusal(path: str, key: str, expected: str) -> RequestError:
    place = f"{path[:200]}.{key}" if key else path[:200]
    return RequestError(f"Unsupported JSON schema at {place}: expected {expected}.")
