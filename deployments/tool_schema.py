"""Whether a tool's parameters are a JSON schema. No network, no references followed."""

from __future__ import annotations

from typing import Any

from deployments.field_kinds import fault

_MAX_DEPTH = 64
_MAX_NODES = 20_000
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SCHEMAS = (
    "items", "additionalProperties", "additionalItems", "unevaluatedItems", "contains", "if",
    "then", "else", "unevaluatedProperties", "propertyNames", "not",
)  # fmt: skip
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
_NUMBERS = ("minimum", "maximum", "multipleOf")
_TEXTS = ("$ref", "pattern", "format", "title", "description", "$schema", "$id")


def checked_parameters(value: Any) -> dict[str, Any] | None:
    """The schema itself. Raises PydanticCustomError saying what is wrong, and where."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fault("expected a JSON schema, an object")
    kind = value.get("type", "object")
    if kind != "object":
        raise fault(f'expected a JSON schema of type "object", found {str(kind)[:40]!r}')
    _Check().schema(value, "parameters", 0)
    return value


class _Check:
    def __init__(self) -> None:
        self._nodes = 0

    def schema(self, value: Any, path: str, depth: int) -> None:
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise fault(
                f"expected a JSON schema of at most {_MAX_DEPTH} levels and {_MAX_NODES} parts"
            )
        if isinstance(value, bool):
            return
        if not isinstance(value, dict):
            self._refuse(path, "a schema: an object, true or false")
        self._plain_values(value, path)
        for key in _MAPS:
            if key in value:
                if not isinstance(value[key], dict):
                    self._refuse(f"{path}.{key}", "an object of schemas")
                for name, part in value[key].items():
                    self.schema(part, f"{path}.{key}.{name[:60]}", depth + 1)
        for key in _LISTS:
            if key in value:
                if not (isinstance(value[key], list) and value[key]):
                    self._refuse(f"{path}.{key}", "a list of at least one schema")
                for number, part in enumerate(value[key]):
                    self.schema(part, f"{path}.{key}.{number}", depth + 1)
        for key in _SCHEMAS:
            if key in value:
                # Draft 7 and before: `items` may be a list.
                parts = value[key] if key == "items" and isinstance(value[key], list) else None
                for number, part in enumerate(parts or ()):
                    self.schema(part, f"{path}.{key}.{number}", depth + 1)
                if parts is None:
                    self.schema(value[key], f"{path}.{key}", depth + 1)

    def _plain_values(self, value: dict[str, Any], path: str) -> None:
        kind = value.get("type")
        if kind is not None:
            kinds = kind if isinstance(kind, list) and kind else [kind]
            if not all(isinstance(name, str) and name in _TYPES for name in kinds):
                self._refuse(f"{path}.type", f"one or several of {', '.join(sorted(_TYPES))}")
        required = value.get("required")
        if required is not None and not (
            isinstance(required, list) and all(isinstance(name, str) for name in required)
        ):
            self._refuse(f"{path}.required", "a list of names")
        if "enum" in value and not (isinstance(value["enum"], list) and value["enum"]):
            self._refuse(f"{path}.enum", "a list of at least one value")
        for key in _COUNTS:
            if key in value and not (type(value[key]) is int and value[key] >= 0):
                self._refuse(f"{path}.{key}", "a whole number from 0 on")
        for key in _NUMBERS:
            if key in value and type(value[key]) not in (int, float):
                self._refuse(f"{path}.{key}", "a number")
        for key in _TEXTS:
            if key in value and not isinstance(value[key], str):
                self._refuse(f"{path}.{key}", "a text")

    @staticmethod
    def _refuse(path: str, expected: str) -> None:
        raise fault(f"{path[:200]} is no valid JSON schema: expected {expected}")
