"""What every benchmark prints beside its rows: machine, versions, and whether it was quiet."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

QUIET_CORES = 0.2
"""Other processes may use this many cores in a run that is called quiet."""

_PACKAGES = ("ray", "torch", "transformers", "triton", "numpy", "openai", "fastapi", "msgspec")


def machine() -> dict[str, Any]:
    """Processor, cores and memory."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        model = next(
            (x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), model
        )
    return {
        "processor": model,
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Python and the packages a measurement may depend on, where installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class QuietMonitor:
    """Measures, while it is open, how many cores processes other than ours used on average."""

    def __init__(self) -> None:
        self.other_cores = 0.0

    def __enter__(self) -> QuietMonitor:
        self._began = _busy_s(), _own_s(), _wall_s()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        busy, own, wall = (now - then for now, then in zip(_now(), self._began, strict=True))
        self.other_cores = max(0.0, busy - own) / max(wall, 1e-9)

    def report(self) -> dict[str, Any]:
        """The entry `quiet` of a benchmark's object."""
        quiet = self.other_cores < QUIET_CORES
        return {"quiet": quiet, "other_cores": round(self.other_cores, 2)}


def quiet_monitor() -> QuietMonitor:
    """Use as a context manager around the measured part."""
    return QuietMonitor()


def emit(
    benchmark: str, rows: Sequence[Mapping[str, Any]], monitor: QuietMonitor, as_json: bool = True
) -> None:
    """Print one object, or a table for people where `as_json` is false."""
    if as_json:
        print(
            json.dumps(
                {
                    "benchmark": benchmark,
                    "machine": machine(),
                    "versions": versions(),
                    "quiet": monitor.report(),
                    "rows": [dict(row) for row in rows],
                }
            )
        )
        return
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    print(f"quiet: {monitor.report()}")


def _now() -> tuple[float, float, float]:
    return _busy_s(), _own_s(), _wall_s()


def _wall_s() -> float:
    return time.monotonic()


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_s() -> float:
    """CPU seconds of this process and of all that it started and that still live."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
