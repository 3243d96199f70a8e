"""The real engine with a log of its steps: who was in each, how long it took, what it missed.

The log lies in the folder that the environment variable STEP_LOG_FOLDER names, a file a process,
a JSON list a line: ["add", seconds, prompt ids], and ["step", seconds, length in seconds, misses,
hits, [[sequence, first row, rows], ...]]. Sequences are numbered as they were added.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from core.request import Request
from core.step import SequencePart, StepResult
from engine.engine import Engine
from engine.engine import open_engine as open_plain_engine

FOLDER_VARIABLE = "STEP_LOG_FOLDER"


def open_engine(settings: dict[str, Any]) -> Engine:
    """An engine factory for `application`; records only where the variable is set."""
    engine = open_plain_engine(settings)
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        _record(engine, Path(folder) / f"{os.getpid()}.jsonl")
    return engine


def _record(engine: Engine, path: Path) -> None:
    log = path.open("w", buffering=1, encoding="utf-8")
    passing: list[SequencePart] = []
    add, step, begin_step = engine.add, engine.step, engine.pool.begin_step

    def recorded_add(request: Request) -> None:
        add(request)
        log.write(json.dumps(["add", time.time(), list(request.prompt_ids)]) + "\n")

    def recorded_begin(parts: Iterable[SequencePart] = (), in_order: bool = False) -> None:
        passing[:] = parts = tuple(parts)
        begin_step(parts, in_order)

    def recorded_step() -> StepResult:
        passing.clear()
        result = step()
        if passing:
            pool = result.stats.pool
            rows = [[part.sequence_id, part.start, len(part.token_ids)] for part in passing]
            counted = [result.stats.step_s, pool.demand_misses, pool.demand_hits]
            log.write(json.dumps(["step", time.time(), *counted, rows]) + "\n")
        return result

    # Methods of this one object: nothing else is told, and nothing else changes.
    engine.add = recorded_add  # type: ignore[method-assign]
    engine.step = recorded_step  # type: ignore[method-assign]
    engine.pool.begin_step = recorded_begin  # type: ignore[method-assign]
