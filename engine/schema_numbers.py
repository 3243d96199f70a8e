"""Bounds of numbers in JSON schemas, as a grammar of digits can hold to them."""

from __future__ import annotations

import math
from typing import Any

from core.errors import RequestError

_LARGEST = 10**15
"""Bounds beyond it are not exact in every reader's floating-point numbers."""
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def number_schema(kind: str, rest: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of a "number" or an "integer". Raises RequestError."""
    bounds = _bounds(rest, path)
    step = rest.get("multipleOf")
    if step is not None and (kind == "number" or type(step) is not int or step < 1 or bounds):
        raise _refusal(path, "multipleOf", "a whole number, for integers without bounds")
    found: dict[str, Any] = {"type": kind}
    if step is not None and step > 1:
        if step > 1000:
            raise _refusal(path, "multipleOf", "at most 1000")
        found["multipleOf"] = step
    if kind == "number":
        if any(value != round(value, 6) for value in bounds.values()):
            raise _refusal(path, min(bounds), "a number of at most six decimal places")
        return found | bounds
    least = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    if "exclusiveMinimum" in bounds:
        least.append(math.floor(bounds["exclusiveMinimum"]) + 1)
    most = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    if "exclusiveMaximum" in bounds:
        most.append(math.ceil(bounds["exclusiveMaximum"]) - 1)
    if least:
        found["minimum"] = max(least)
    if most:
        found["maximum"] = min(most)
    if least and most and max(least) > min(most):
        raise _refusal(path, "maximum", "a whole number between the bounds")
    return found


def _bounds(rest: dict[str, Any], path: str) -> dict[str, float]:
    found = {key: rest[key] for key in _BOUNDS if key in rest}
    for strict, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(strict), bool):  # draft 4: a flag beside the bound
            flag = found.pop(strict)
            if flag and plain in found:
                found[strict] = found.pop(plain)
    for key, value in found.items():
        if type(value) not in (int, float) or not abs(value) <= _LARGEST:
            raise _refusal(path, key, f"a number between -{_LARGEST} and {_LARGEST}")
    return found


def _refusal(path: str, key: str, expected: str) -> RequestError:
    return RequestError(f"Unsupported JSON schema at {path[:200]}.{key}: expected {expected}.")
