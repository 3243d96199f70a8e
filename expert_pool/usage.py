"""What a model's experts were used for in earlier runs, kept on disk by the model's content.

A new replica reads the experts that were used most before it is ready, and knows the domains. All
replicas of a machine add to one file; it is replaced as a whole, so a full disk or a crash leaves
the old one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from core.cache_folder import cache_folder, is_there
from core.errors import CheckpointError
from expert_pool import popularity_file
from expert_pool.popularity import Popularity
from expert_pool.popularity_file import StoredUse
from expert_pool.tables import IntArray, State

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import CheckpointIndex
    from expert_pool.pool import ExpertPool

_log = logging.getLogger(__name__)
HALF_LIFE_TOKENS: Final = 50_000.0
SAVE_EVERY_S: Final = 60.0
_POLL_S: Final = 0.002
_PATIENCE_S: Final = 0.5
"""How long a replica waits for another one that is saving."""


class Usage:
    """The popularity file of one model. Used by one thread."""

    def __init__(self, index: CheckpointIndex, clock: Callable[[], float]) -> None:
        self.path: Path = cache_folder() / "popularity" / f"{index.content_key}.npz"
        self._content_key = index.content_key
        self._top_k = np.array([layer.top_k for layer in index.layers])
        self._clock = clock
        self._saved_s = clock()
        most = max(layer.num_experts for layer in index.layers)
        self._saved: IntArray = np.zeros((len(index.layers), most), dtype=np.int64)

    def hot_list(self, slots: IntArray) -> list[tuple[int, int]]:
        """(layer, expert) that were used most, for `slots` of each layer; [] if nothing is known.

        The most used one over all layers comes first.
        """
        known = self.known()
        return [] if known is None else known.everyone.hot_list(slots)

    def is_due(self) -> bool:
        """Whether the last time that it was saved is long ago."""
        return self._clock() - self._saved_s >= SAVE_EVERY_S

    def save(self, loads: IntArray, domains: Mapping[str, Popularity] | None = None) -> bool:
        """Adds what was used since the last time; `loads` [layers, experts] counts from the start,
        `domains` what the tokens of each were used for since the last time that it was kept.

        Where the file cannot be written, a warning says so and nothing else happens; False then.
        """
        self._saved_s = self._clock()
        fresh = loads - self._saved
        if not fresh.any():
            return True
        try:
            with self._my_turn() as mine:
                if not mine:
                    _log.warning("%s is being written by another process: next time", self.path)
                    return False
                self._add(fresh, domains or {})
        except OSError as error:
            _log.warning(
                "%s cannot be written (%s): a new replica will start without knowing which "
                "experts are used most. Set COTERIE_CACHE to a folder that is writable.",
                self.path,
                error.strerror or error,
            )
            return False
        self._saved = loads.copy()
        return True

    def known(self) -> StoredUse | None:
        """What lies on the disk now."""
        if not is_there(self.path):
            return None
        try:
            found = popularity_file.load(self.path, self._content_key)
        except CheckpointError as error:
            _log.warning("%s; it is made anew", error)
            return None
        return found if found.everyone.counts.shape == self._saved.shape else None

    def _add(self, fresh: IntArray, domains: Mapping[str, Popularity]) -> None:
        known = self.known() or StoredUse(self._nothing())
        known.everyone.add_all(fresh, fresh.sum(axis=1) // self._top_k)
        for name, popularity in domains.items():
            stored = known.domains.setdefault(name, self._nothing())
            stored.add_all(popularity.counts, popularity.tokens)
        popularity_file.save(known, self.path, self._content_key)

    def _nothing(self) -> Popularity:
        layers, experts = self._saved.shape
        return Popularity(layers, experts, HALF_LIFE_TOKENS)

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[bool]:
        """Replicas take turns by a lock beside the file, as that is replaced.

        True also where the file system knows no locks. Waits for a short time only.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _taken(lock, time.monotonic() + _PATIENCE_S)
        finally:
            os.close(lock)  # and with it the turn


def _taken(lock: int, until_s: float) -> bool:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return True
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def warm_up(pool: ExpertPool, limit_s: float) -> float:
    """Reads the hot list into the slots, for at most `limit_s`; returns the seconds it took.

    What is not there by then, and whatever else has a slot of its own, comes in afterwards, while
    nothing is asked for.
    """
    quotas = pool.residency.quotas
    hot = pool.usage.hot_list(np.array(quotas)) if pool.usage is not None else []
    rest = [
        (layer.ordinal, expert)
        for layer in pool.index.layers
        if quotas[layer.ordinal] >= layer.num_experts
        for expert in range(layer.num_experts)
    ]
    pool.preload([*hot, *rest])
    began = pool.clock()
    state = pool.residency.states.state
    at = tuple(np.array(hot, dtype=np.int64).reshape(-1, 2).T)
    while (state[at] == State.LOADING).any() and pool.clock() - began < limit_s:
        pool.collect(wait=False)
        time.sleep(_POLL_S)
    return pool.clock() - began
