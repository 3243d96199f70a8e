"""Up to how many rows an expert the native kernels beat torch: measured once for each machine.

Which kernel computes decides last bits, so replicas of one machine must agree: who measures first
writes the answer to disk, and whoever was slower takes that one. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.cache_folder import cache_folder

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Mean rows of the experts that a call uses; more than the last count as the last."""
FASTER = 1.05
"""By so much native has to be faster."""
_known: dict[str, RowTable] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class RowTable:
    """Native is used while a call's experts have at most `most_rows` rows each, on average."""

    most_rows: float

    def is_native(self, rows: int, experts: int) -> bool:
        """Whether a call with `rows` (token, expert) pairs over `experts` distinct ones is."""
        return rows <= self.most_rows * experts


ALWAYS = RowTable(float("inf"))


def measured_table(
    seconds: Callable[[int], tuple[float, float]], enough: Callable[[], bool]
) -> RowTable:
    """Measures bucket after bucket until torch wins, as its share of the work grows with the rows.

    `seconds(rows)` is what native and torch take with so many rows an expert; a bucket that torch
    wins is measured again. `enough()` ends it: buckets not measured go to torch.
    """
    most = 0.0
    for at, rows in enumerate(BUCKETS):
        if enough():
            return RowTable(most)
        if not any(native * FASTER <= torch for native, torch in (seconds(rows) for _ in range(2))):
            return RowTable(most)
        # Up to half way, in ratio, to the next bucket.
        most = rows * 1.5 if at + 1 < len(BUCKETS) else float("inf")
    return RowTable(most)


def table_for(machine: Mapping[str, Any], measure: Callable[[], RowTable]) -> RowTable:
    """The table of what `machine` describes: known, on disk, or measured now and kept."""
    text = json.dumps(machine, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    with _lock:
        if key not in _known:
            path = cache_folder() / "expert-kernels" / f"{key}.json"
            _known[key] = _read(path) or _keep(path, machine, measure())
        return _known[key]


def _read(path: Path) -> RowTable | None:
    try:
        most = json.loads(path.read_text(encoding="utf-8"))["most_rows"]
        return RowTable(float("inf") if most is None else float(most))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(path: Path, machine: Mapping[str, Any], table: RowTable) -> RowTable:
    """Writes a table where there is none; returns the one that is there."""
    most = None if table.most_rows == float("inf") else table.most_rows
    content = json.dumps({"most_rows": most, "machine": machine}, indent=2)
    # Where nothing can be kept, each process measures for itself.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".table-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(content)
            try:
                os.link(name, path)  # whole, and only where nobody was first
            except FileExistsError:
                if _read(path) is None:
                    os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    return _read(path) or table
