"""JSON schemas in the part of the language that a grammar can hold to the letter.

A grammar compiler drops what it cannot express, in silence or with a warning on stderr. Here a
schema is rewritten so that every text of its grammar is valid under it, or refused with the
keyword and the place. Sound, not complete: objects that list their properties get those only
unless `additionalProperties` says otherwise, and a pattern is matched by the whole text.

Keywords and their meaning: JSON Schema 2020-12, Core and Validation; the lists and booleans of
drafts 4 to 7 are understood too. Keywords of no vocabulary are ignored, as the standard demands.
"""

from __future__ import annotations

import json
from typing import Any

from core.errors import RequestError
from engine.pattern_check import check_pattern
from engine.schema_merge import disjoint, merge
from engine.schema_numbers import number_schema

MAX_DEPTH = 64
MAX_NODES = 5_000
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_REFUSED = {
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies",
    "contains", "minContains", "maxContains", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "unevaluatedProperties",
    },
}  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def enforceable(schema: Any) -> dict[str, Any]:
    """The schema whose grammar gives only texts that are valid under `schema`.

    Raises RequestError for what is no schema, and for what no grammar can hold to.
    """
    rewriter = _Rewriter(schema)
    root = rewriter.rewrite(schema, "schema", 0)
    return {**root, "$defs": rewriter.definitions} if rewriter.definitions else root


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._nodes = 0
        self.definitions: dict[str, Any] = {}
        """Rewritten targets of references, by new names."""

    def rewrite(self, schema: Any, path: str, depth: int) -> dict[str, Any]:
        """The rewritten schema at a place of the original."""
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise RequestError(
                f"expected a JSON schema of at most {MAX_DEPTH} levels and {MAX_NODES} parts, "
                "references and combinations unfolded."
            )
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise _refusal(path, "", "a schema that some value can meet: an object or true")
        for key in sorted(schema.keys() & _REFUSED):
            raise _refusal(path, key, "a schema without it: it cannot be enforced here")
        return self._combined(schema, path, depth)

    def _combined(self, schema: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        rest = {key: value for key, value in schema.items() if key in _ASSERTIONS}
        if "$ref" in rest:
            pointer = rest.pop("$ref")
            if not rest:
                return {"$ref": f"#/$defs/{self._definition(pointer, path, depth)}"}
            return self.rewrite(merge(self._target(pointer, path), rest, path), path, depth + 1)
        if "allOf" in rest:
            for branch in _schemas(rest.pop("allOf"), f"{path}.allOf"):
                rest = merge(rest, self._plain(branch, path), f"{path}.allOf")
            return self.rewrite(rest, path, depth + 1)
        for key in ("anyOf", "oneOf"):
            if key in rest:
                branches = _schemas(rest.pop(key), f"{path}.{key}")
                full = [merge(rest, self._plain(b, path), f"{path}.{key}") for b in branches]
                if key == "oneOf" and not disjoint(full, self._plain, path):
                    raise _refusal(path, key, "branches that exclude each other, or anyOf")
                kept = branches if not rest else full
                places = [f"{path}.{key}.{number}" for number in range(len(kept))]
                parts = [
                    self.rewrite(b, place, depth + 1) for b, place in zip(kept, places, strict=True)
                ]
                return {"anyOf": parts}
        if "const" in rest:
            rest = merge(rest, {}, path)  # const becomes an enum of one
        if "enum" in rest:
            return _enum(rest, path)
        return self._typed(rest, path, depth)

    def _typed(self, rest: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        types = _types(rest, path)
        if types is None:
            return {}
        makers = {"string": self._string, "array": self._array, "object": self._object}
        found = []
        for kind in types:
            if kind in ("number", "integer"):
                found.append(number_schema(kind, rest, path))
            elif kind in makers:
                found.append(makers[kind](rest, path, depth))
            else:
                found.append({"type": kind})
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _string(self, rest: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        _counts(rest, path, "minLength", "maxLength")
        lengths: dict[str, Any] = {
            key: rest[key] for key in ("minLength", "maxLength") if key in rest
        }
        if lengths == {"minLength": 0}:
            lengths = {}
        if "pattern" in rest:
            if lengths:
                raise _refusal(path, "pattern", "no minLength or maxLength beside it")
            check_pattern(rest["pattern"], f"{path}.pattern")
            found["pattern"] = rest["pattern"]
        elif lengths:
            found |= lengths
        elif isinstance(rest.get("format"), str):
            # An annotation; the compiler holds to those that it knows.
            found["format"] = rest["format"]
        return found

    def _array(self, rest: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        _counts(rest, path, "minItems", "maxItems")
        if rest.get("uniqueItems") and rest.get("maxItems", 2) > 1:
            raise _refusal(path, "uniqueItems", "a schema without it: it cannot be enforced here")
        found: dict[str, Any] = {"type": "array"}
        items, prefix = rest.get("items"), rest.get("prefixItems")
        if isinstance(items, list):  # before draft 2020-12
            items, prefix = rest.get("additionalItems"), items
        if prefix is not None:
            found["prefixItems"] = [
                self.rewrite(part, f"{path}.prefixItems.{number}", depth + 1)
                for number, part in enumerate(_schemas(prefix, f"{path}.prefixItems"))
            ]
        if items is False:
            found["items"] = False
            longest = len(found.get("prefixItems", ()))
            if rest.get("minItems", 0) > longest:
                raise _refusal(path, "minItems", f"at most {longest}, the items there can be")
        elif items is not None:
            found["items"] = self.rewrite(items, f"{path}.items", depth + 1)
        return found | {key: rest[key] for key in ("minItems", "maxItems") if key in rest}

    def _object(self, rest: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        _counts(rest, path, "minProperties", "maxProperties")
        given = rest.get("properties", {})
        patterns = rest.get("patternProperties", {})
        required = rest.get("required", [])
        if not isinstance(given, dict) or not isinstance(patterns, dict):
            raise _refusal(path, "properties", "an object of schemas")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refusal(path, "required", "a list of names")
        extra = rest.get("additionalProperties", rest.get("unevaluatedProperties"))
        if extra is None:
            extra = not (given or patterns)
        if patterns:
            if given or required or extra not in (False, True):
                raise _refusal(path, "patternProperties", "no other keyword about properties")
            extra = False
        if "propertyNames" in rest and (given or patterns or extra is False):
            raise _refusal(path, "propertyNames", "no other keyword about properties")
        properties = {
            name: self.rewrite(part, f"{path}.properties.{name[:60]}", depth + 1)
            for name, part in given.items()
            if part is not False or extra is not False or name in required
        }
        for name in required:
            if name not in properties:
                properties[name] = self.rewrite(extra, f"{path}.required.{name[:60]}", depth + 1)
        found: dict[str, Any] = {"type": "object"}
        if properties:
            found["properties"] = properties
            found["required"] = list(dict.fromkeys(required))
        if patterns:
            found["patternProperties"] = {}
            for pattern, part in patterns.items():
                check_pattern(pattern, f"{path}.patternProperties")
                place = f"{path}.patternProperties.{pattern[:60]}"
                found["patternProperties"][pattern] = self.rewrite(part, place, depth + 1)
            if len(patterns) > 1:
                raise _refusal(path, "patternProperties", "one pattern: several may overlap")
        if "propertyNames" in rest:
            names = self._plain(rest["propertyNames"], path)
            if names.keys() - {"type", "pattern"} or names.get("type", "string") != "string":
                raise _refusal(path, "propertyNames", "a pattern only")
            check_pattern(names.get("pattern", ""), f"{path}.propertyNames")
            found["propertyNames"] = names
        found["additionalProperties"] = (
            extra
            if isinstance(extra, bool)
            else self.rewrite(extra, f"{path}.additionalProperties", depth + 1)
        )
        return found | _property_counts(rest, found, path)

    def _definition(self, pointer: Any, path: str, depth: int) -> str:
        target = self._target(pointer, path)
        if pointer not in self._names:
            name = self._names[pointer] = f"d{len(self._names)}"
            self.definitions[name] = self.rewrite(target, str(pointer)[:80], depth + 1)
        return self._names[pointer]

    def _target(self, pointer: Any, path: str) -> Any:
        """What a reference within the schema points at (RFC 6901)."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise _refusal(path, "$ref", "a reference within the schema, such as #/$defs/name")
        found = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise _refusal(path, "$ref", f"a part of the schema, found {pointer[:80]!r}")
        return found

    def _plain(self, schema: Any, path: str) -> dict[str, Any]:
        """The assertions of a schema, a mere reference followed."""
        for _ in range(MAX_DEPTH):
            if schema is True:
                return {}
            if not isinstance(schema, dict):
                raise _refusal(path, "", "a schema that some value can meet: an object or true")
            for key in sorted(schema.keys() & _REFUSED):
                raise _refusal(path, key, "a schema without it: it cannot be enforced here")
            rest = {key: value for key, value in schema.items() if key in _ASSERTIONS}
            if rest.keys() != {"$ref"}:
                return rest
            schema = self._target(rest["$ref"], path)
        raise _refusal(path, "$ref", "references that lead to a schema")


_ASSERTIONS = {"$ref", "allOf", "anyOf", "oneOf", "const", "enum", "type"}.union(
    *_KEYWORDS.values()
)


def _refusal(path: str, key: str, expected: str) -> RequestError:
    place = f"{path[:200]}.{key}" if key else path[:200]
    return RequestError(f"Unsupported JSON schema at {place}: expected {expected}.")


def _schemas(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _refusal(path, "", "a list of at least one schema")
    return value


def _types(rest: dict[str, Any], path: str) -> list[str] | None:
    """The types that values may have; None: any. Keywords alone imply their type."""
    asked = rest.get("type")
    if asked is None:
        kinds = [kind for kind, words in _KEYWORDS.items() if words & rest.keys()]
        return kinds or None
    kinds = asked if isinstance(asked, list) else [asked]
    if not kinds or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        raise _refusal(path, "type", f"one or several of {', '.join(_TYPES)}")
    return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]


def _counts(rest: dict[str, Any], path: str, least: str, most: str) -> None:
    for key in (least, most):
        value = rest.get(key, 0)
        if isinstance(value, float) and value.is_integer():
            value = rest[key] = int(value)
        if type(value) is not int or not 0 <= value < 2**31:
            raise _refusal(path, key, "a whole number from 0 on")
    if rest.get(least, 0) > rest.get(most, 2**31):
        raise _refusal(path, least, f"at most {most}")


def _enum(rest: dict[str, Any], path: str) -> dict[str, Any]:
    values = rest["enum"]
    if not isinstance(values, list) or not values:
        raise _refusal(path, "enum", "a list of at least one value")
    others = rest.keys() - {"enum", "type"}
    if others:
        raise _refusal(path, min(others), "no other keyword beside enum or const")
    types = _types(rest, path)
    fit = [value for value in values if types is None or _has_type(value, types)]
    if not fit:
        raise _refusal(path, "enum", "a value of the type asked for")
    return {"enum": list({json.dumps(value, sort_keys=True): value for value in fit}.values())}


def _has_type(value: Any, types: list[str]) -> bool:
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in types
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return "number" in types or ("integer" in types and whole)
    names: dict[type, str] = {str: "string", list: "array"}
    return names.get(type(value), "object") in types


def _property_counts(rest: dict[str, Any], found: dict[str, Any], path: str) -> dict[str, Any]:
    """Bounds on the number of properties; a key that comes twice counts once for its reader."""
    counts: dict[str, Any] = {
        key: rest[key] for key in ("minProperties", "maxProperties") if key in rest
    }
    least = counts.get("minProperties", 0)
    sure = len(found.get("required", ()))
    if least <= sure:
        counts.pop("minProperties", None)
    elif (least > 1 and found["additionalProperties"] is not False) or "patternProperties" in found:
        raise _refusal(path, "minProperties", f"at most {max(1, sure)} where names are free")
    return counts
