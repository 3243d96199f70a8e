"""The strict base of every settings model: unknown keys are errors, and values are immutable."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}iB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power


def parse_bytes(value: object) -> int:
    """Bytes from an int or a text such as "512MiB", "8 GiB", "2GB". Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f'expected bytes as a number or a text such as "8GiB", found {value!r}')
    if isinstance(value, int):
        number, unit = float(value), ""
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match.group(2) not in _UNITS:
            raise ValueError(
                f'expected bytes such as "8GiB" (units: {", ".join(u for u in _UNITS if u)}), '
                f"found {value!r}"
            )
        number, unit = float(match.group(1)), match.group(2)
    if number < 0:
        raise ValueError(f"expected bytes >= 0, found {value!r}")
    return int(number * _UNITS[unit])


def format_bytes(nbytes: float) -> str:
    """A short human form, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def exact_bytes(nbytes: int) -> str:
    """The shortest form that `parse_bytes` reads back as the same number, such as "8GiB"."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{letter}iB"
    return str(nbytes)


ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
"""An int field of bytes that also takes "8GiB"."""


class ConfigModel(BaseModel):
    """Base of all settings: strict about keys, frozen, defaults validated, docs from fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )
