"""Marks a thread whose forward pass goes layer by layer over many tokens, and may pause between.

In such a pass a layer's experts are taken one after another, each read once. Sums over a token's
experts are made in ascending order of experts, where step by step they are made in router order:
last bits may differ between the two, so the step plan says which it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_mode = threading.local()


def _go_on(within_layer: bool) -> bool:
    return False


@contextmanager
def layer_major(pause: Callable[[bool], bool] = _go_on) -> Iterator[None]:
    """Experts that this thread calls inside of it pass layer-major.

    `pause(within_layer)` is called before each MoE layer, and within one where a read is awaited,
    while nothing of the pool is pinned; it returns whether anything else ran meanwhile. A pass
    inside of another one keeps the outer one's.
    """
    if is_layer_major():
        yield
        return
    _mode.pause = pause
    try:
        yield
    finally:
        del _mode.pause


def is_layer_major() -> bool:
    """Whether this thread is inside of `layer_major`."""
    return hasattr(_mode, "pause")


def pause(within_layer: bool) -> bool:
    """The pass may be paused here; returns when it is to go on, and whether it was."""
    return is_layer_major() and bool(_mode.pause(within_layer))
