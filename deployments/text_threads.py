"""A few threads for work on long texts, so that none of it blocks a process's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_CHARS = 200_000
"""Longer texts take seconds: they have a thread of their own, so that others need not wait."""
_THREADS = 2
_SHORT_CHARS = 2_000

Result = TypeVar("Result")


class TextThreads:
    """Runs work; what is short enough to be faster than a change of thread runs inline."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="text-long")

    async def run(self, size_chars: int, work: Callable[[], Result]) -> Result:
        """The work's result; in a thread where as much text as that would hold the loop up."""
        if size_chars <= _SHORT_CHARS:
            return work()
        pool = self._pool if size_chars <= LONG_CHARS else self._long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """End the threads."""
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)
