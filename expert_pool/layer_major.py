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


def _go_on() -> None:
    return


@contextmanager
def layer_major(before_layer: Callable[[], None] = _go_on) -> Iterator[None]:
    """Experts that this thread calls inside of it pass layer-major.

    `before_layer` is called before each MoE layer, while nothing of the pool is pinned. A pass
    inside of another one keeps the outer one's.
    """
    if is_layer_major():
        yield
        return
    _mode.before_layer = before_layer
    try:
        yield
    finally:
        del _mode.before_layer


def is_layer_major() -> bool:
    """Whether this thread is inside of `layer_major`."""
    return hasattr(_mode, "before_layer")


def before_layer() -> None:
    """Pauses the pass where it may pause; returns when it is to go on."""
    _mode.before_layer()
