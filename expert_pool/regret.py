"""How far from the best possible the cache was: shadow windows on some layers, worked out later.

The step's thread only notes what was asked. A thread of its own runs Belady's optimum over each
full window, a step at a time with pauses, so that it never holds the interpreter for long.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

from expert_pool.oracle import ShadowWindow, Window
from expert_pool.tables import IntArray

WINDOW_STEPS: Final = 64
MOST_WAITING: Final = 8
"""Windows that may wait for the thread; more are dropped rather than kept."""
_PAUSE_S: Final = 0.0005


class RegretMeter:
    """Belongs to one pool. `record` and `take` are called by its step thread."""

    def __init__(self, num_experts: Sequence[int], most_layers: int) -> None:
        """At most `most_layers` layers, evenly spaced, are compared."""
        every = max(1, -(-len(num_experts) // most_layers))
        self._shadows = {
            layer: ShadowWindow(layer, num_experts[layer], WINDOW_STEPS)
            for layer in range(0, len(num_experts), every)
        }
        self.layers = frozenset(self._shadows)
        """Those that are compared."""
        self._windows: queue.Queue[Window | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._done = (0, 0)
        self._thread: threading.Thread | None = None

    def record(
        self, layer: int, residents: IntArray, capacity: int, experts: IntArray, misses: int
    ) -> None:
        """A compared layer held `residents`, was asked for `experts`, and missed `misses`."""
        window = self._shadows[layer].record(residents, capacity, experts, misses)
        if window is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="regret", daemon=True)
            self._thread.start()
        try:
            self._windows.put_nowait(window)
        except queue.Full:
            return

    def take(self) -> tuple[int, int]:
        """(optimum's misses, the cache's misses) of the windows that became known since."""
        if self._thread is None:
            return 0, 0
        with self._lock:
            done, self._done = self._done, (0, 0)
        return done

    def close(self) -> None:
        """End the thread; a window under way is given up."""
        if self._thread is None:
            return
        while not self._windows.empty():
            try:
                self._windows.get_nowait()
            except queue.Empty:
                break
        self._windows.put(None)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while (window := self._windows.get()) is not None:
            optimum = window.optimum(lambda: time.sleep(_PAUSE_S))
            with self._lock:
                self._done = (self._done[0] + optimum, self._done[1] + window.misses)
