"""Row tables on disk: measured once for a machine, and the same for all that serve on it.

Which kernel computes decides last bits, so replicas of one machine must agree. Each of them holds a
lock on its table for as long as it lives, shared with the others; only who is alone may measure.
What was measured while other programs used the processor is measured again by a later start that is
alone, at most so often that it settles. No torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from core.cache_folder import cache_folder
from expert_pool.kernels.row_table import RowTable

QUIET_SHARE = 0.1
"""Other programs may use this share of all cores while a table is measured."""
TRIES = 3
"""So often it is measured at most, where the machine is never quiet."""
_WAIT_S = 30.0
_POLL_S = 0.02
_log = logging.getLogger(__name__)
_known: dict[str, RowTable] = {}
_held: dict[str, int] = {}
"""Open files whose locks say that this process uses these tables."""
_lock = threading.Lock()


@dataclass(frozen=True)
class KeptTable:
    """A table and how it came about."""

    table: RowTable
    others_share: float = 0.0
    """Of all cores, what other programs used meanwhile."""
    tries: int = 1

    @property
    def is_settled(self) -> bool:
        """Whether it stays."""
        return self.others_share < QUIET_SHARE or self.tries >= TRIES


def table_for(machine: Mapping[str, Any], measure: Callable[[], RowTable]) -> RowTable:
    """The table of what `machine` describes: known, on disk, or measured now and kept."""
    text = json.dumps(machine, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    with _lock:
        if key not in _known:
            _known[key] = _settle(key, machine, measure)
        return _known[key]


def _settle(key: str, machine: Mapping[str, Any], measure: Callable[[], RowTable]) -> RowTable:
    try:
        path = cache_folder() / "expert-kernels" / f"{key}.json"
    except RuntimeError:  # no home folder
        return measure()
    mine = None
    handle = _open_lock(path.with_suffix(".lock"))
    if handle is not None:
        _held[key] = handle
        if _locks(handle, fcntl.LOCK_EX):
            kept = _read(path)
            if kept is None or not kept.is_settled:
                mine = _measured(measure, kept)
                _write(path, machine, mine)
        # Whoever measures now is waited for.
        until = time.monotonic() + _WAIT_S
        while not _locks(handle, fcntl.LOCK_SH) and time.monotonic() < until:
            time.sleep(_POLL_S)
    kept = _read(path)
    if kept is None:
        # Where nothing can be locked, or what others hold was lost.
        kept = mine or _measured(measure, None)
        _write(path, machine, kept, only_first=True)
        kept = _read(path) or kept
    if not kept.is_settled:
        _log.warning(
            "up to how many rows an expert native kernels are faster was measured while other "
            "programs used %d%% of this machine: %g; it is measured again at a start with no other "
            "server here, or remove %s",
            round(100 * kept.others_share),
            kept.table.most_rows,
            path,
        )
    return kept.table


def _open_lock(path: Path) -> int | None:
    """An open file, read only: of another user's a lock can be had too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError:
        return None


def _locks(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can wait for anybody
        return kind == fcntl.LOCK_SH
    return True


def _measured(measure: Callable[[], RowTable], before: KeptTable | None) -> KeptTable:
    began = _processor_seconds()
    table = measure()
    there, busy, own = (now - then for now, then in zip(_processor_seconds(), began, strict=True))
    others = max(0.0, busy - own) / max(there, 1e-9)
    return KeptTable(table, round(others, 2), 1 if before is None else before.tries + 1)


def _processor_seconds() -> tuple[float, float, float]:
    """What all cores have to give since some moment, what was used of it, and by this process."""
    there = time.monotonic() * (os.cpu_count() or 1)
    try:
        times = psutil.cpu_times()
    except (OSError, ValueError):  # a sandbox that does not tell
        return there, 0.0, 0.0
    busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
    own = os.times()
    return there, busy, own.user + own.system


def _read(path: Path) -> KeptTable | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        most = found["most_rows"]
        table = RowTable(float("inf") if most is None else float(most))
        if not table.most_rows >= 0:
            return None
        return KeptTable(table, float(found["others_share"]), int(found["tries"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _write(
    path: Path, machine: Mapping[str, Any], kept: KeptTable, only_first: bool = False
) -> None:
    """Keeps a table, or only where there is none that can be read."""
    most = None if kept.table.most_rows == float("inf") else kept.table.most_rows
    content = json.dumps(
        {
            "most_rows": most,
            "others_share": kept.others_share,
            "tries": kept.tries,
            "machine": machine,
        },
        indent=2,
    )
    # Where nothing can be kept, each process measures for itself.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".table-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                os.fchmod(stream.fileno(), 0o644)
                stream.write(content)
            if not only_first or not _link(name, path):
                os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)


def _link(name: str, path: Path) -> bool:
    """Whether there is a whole table at `path` now, this one or another one's."""
    with contextlib.suppress(OSError):
        os.link(name, path)
    return _read(path) is not None
