"""Threads that look what may come next in structured sequences, beside the step loop.

The work is native code that lets other threads run. Most looks take microseconds; some grammars
take seconds a token. Those get a lane of their own, so that they hold up nobody else's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.structure_matcher import StructureMatcher

_QUICK_THREADS = 2
_SLOW_THREADS = 1


class Look:
    """One task: take a token, if there is one, and find what may follow."""

    def __init__(self, owner: int, matcher: StructureMatcher, token_id: int | None) -> None:
        self.owner = owner
        """Id of the sequence."""
        self._matcher = matcher
        self._token_id = token_id
        self.began_s: float | None = None
        self.took_s = 0.0
        self.error: Exception | None = None
        self.dropped = False
        """Nobody waits for it: where it has not begun, it need not."""
        self.done = False
        """Whether its thread is done with it, and was not told to give it up before."""

    def run(self) -> None:
        """Done in a lane's thread; nobody else touches the matcher meanwhile."""
        self.began_s = time.monotonic()
        if self.dropped:
            return
        try:
            if self._token_id is not None:
                self._matcher.accept(self._token_id)
            self._matcher.look()
        # Whatever it is, it is the fault of this sequence's structure, and told to its request.
        except Exception as error:
            self.error = error
        self.took_s = time.monotonic() - self.began_s


class MaskLanes:
    """A quick and a slow lane; threads start when they are first needed."""

    def __init__(self, on_done: Callable[[Look], None]) -> None:
        """`on_done` is called from a lane's thread."""
        self._on_done = on_done
        self._lanes = tuple(queue.SimpleQueue[Look | None]() for _ in range(2))
        self._threads = [0, 0]
        self._lock = threading.Lock()
        """A look is done, or given up: never both."""
        self._given_up: set[Look] = set()

    @property
    def stuck(self) -> int:
        """Looks that were given up and still run."""
        return len(self._given_up)

    def submit(self, look: Look, slow: bool) -> None:
        """Queue a look."""
        for lane, count in enumerate((_QUICK_THREADS, _SLOW_THREADS)):
            while self._threads[lane] < count:
                self._start(lane)
        self._lanes[slow].put(look)

    def give_up(self, look: Look, slow: bool) -> bool:
        """A running look that nobody waits for any more: another thread takes its place.

        False where it is done already: its news is there, or will be at once.
        """
        with self._lock:
            if look.done:
                return False
            try:
                self._start(int(slow))
            except RuntimeError:
                return True  # no more threads can be had: this one keeps its place
            self._given_up.add(look)
        return True

    def close(self) -> None:
        """The threads end when they are done with what they do."""
        for lane in self._lanes:
            for _ in range(sum(self._threads)):
                lane.put(None)

    def _start(self, lane: int) -> None:
        threading.Thread(target=self._work, args=(lane,), name="masks", daemon=True).start()
        self._threads[lane] += 1

    def _work(self, lane: int) -> None:
        while (look := self._lanes[lane].get()) is not None:
            look.run()
            with self._lock:
                if look in self._given_up:
                    self._given_up.discard(look)
                    return  # another thread has its place
                look.done = True
            self._on_done(look)
