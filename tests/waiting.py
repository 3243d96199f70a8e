"""Waiting for what another thread or process is about to do, but not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def until(condition: Callable[[], Result], limit_s: float = 30.0, pause_s: float = 0.02) -> Result:
    """What `condition` says once it is true. Fails after `limit_s`, with what it said last."""
    deadline = time.monotonic() + limit_s
    while not (said := condition()):
        assert time.monotonic() < deadline, f"not true within {limit_s:.0f} s: {said!r}"
        time.sleep(pause_s)
    return said
