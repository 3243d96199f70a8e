"""Gives back to the system what the process has freed. No torch here."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def return_freed_memory() -> None:
    """Returns freed heap pages, in milliseconds. Does nothing where the C library cannot.

    The C library keeps what the largest steps once needed, in an arena for each thread, until its
    topmost block is free: a server's resident memory would tell its history, not its need.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim(3); None under another C library."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
