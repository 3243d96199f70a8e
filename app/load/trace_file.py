"""Recorded arrivals: CSV files with the columns arrival_s, prompt_tokens and output_tokens."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from app.load.arrivals import Arrival
from core.errors import SettingsError

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
"""Found by these names; further columns, such as a source, are labels that nobody reads."""


def read_trace(path: Path) -> list[Arrival]:
    """The rows in order of arrival, the first at 0 s. Raises SettingsError naming file and line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise SettingsError(
                    f"{path}: expected the columns {', '.join(COLUMNS)}; the first line lacks "
                    f"{', '.join(missing)}"
                )
            arrivals = [_arrival(row, f"{path}:{rows.line_num}") for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SettingsError(f"cannot read the trace {path}: {error}") from error
    if not arrivals:
        raise SettingsError(f"{path}: expected arrivals after the first line, found none")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    begin_s = arrivals[0].at_s
    return [Arrival(x.at_s - begin_s, x.prompt_tokens, x.output_tokens) for x in arrivals]


def scaled(
    arrivals: list[Arrival],
    speed: float,
    token_scale: float,
    requests: int | None,
    duration_s: float | None,
) -> list[Arrival]:
    """`speed` times as fast, lengths times `token_scale` (at least one token), cut at the ends."""

    def tokens(count: int) -> int:
        return max(1, round(count * token_scale))

    faster = [
        Arrival(x.at_s / speed, tokens(x.prompt_tokens), tokens(x.output_tokens))
        for x in arrivals[:requests]
    ]
    return [x for x in faster if duration_s is None or x.at_s < duration_s]


def _arrival(row: dict[str, str], place: str) -> Arrival:
    try:
        at_s, prompt, output = (float(row[name]) for name in COLUMNS)
    except (TypeError, ValueError):
        at_s = math.nan
    if not math.isfinite(at_s) or at_s < 0:
        raise SettingsError(f"{place}: expected three numbers, found {list(row.values())[:4]}")
    if not (prompt >= 1 and output >= 1 and prompt.is_integer() and output.is_integer()):
        raise SettingsError(
            f"{place}: expected at least one prompt and output token, found {prompt:g} and "
            f"{output:g}"
        )
    return Arrival(at_s, int(prompt), int(output))
