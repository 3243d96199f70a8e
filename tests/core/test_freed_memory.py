"""Memory that a process freed goes back to the system."""

from __future__ import annotations

import sys

import psutil
import pytest

from core.freed_memory import return_freed_memory

PIECE_BYTES = 60_000  # below what the C library maps by itself
PIECES = 2_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc_trim")
def test_what_was_freed_below_a_block_in_use_is_returned() -> None:
    process = psutil.Process()
    pieces = [b"\1" * PIECE_BYTES for _ in range(PIECES)]
    topmost = pieces[-1]
    full_bytes = process.memory_info().rss
    del pieces
    return_freed_memory()
    returned_bytes = full_bytes - process.memory_info().rss
    assert returned_bytes > 0.9 * PIECE_BYTES * PIECES
    assert topmost[0] == 1
