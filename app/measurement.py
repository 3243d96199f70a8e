"""What measurements print beside their rows: machine, versions, and whether it was quiet."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
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
    """Measures, while it is open, how many cores processes other than ours used on average.

    Ours are this process, the processes `own_roots`, and all that these started.
    """

    def __init__(self, own_roots: Sequence[int] = ()) -> None:
        self.other_cores = 0.0
        self._own_roots = own_roots

    def __enter__(self) -> QuietMonitor:
        self._began = self._now()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        busy, own, wall = (now - then for now, then in zip(self._now(), self._began, strict=True))
        self.other_cores = max(0.0, busy - own) / max(wall, 1e-9)

    def report(self) -> dict[str, Any]:
        """The entry `quiet` of a benchmark's object."""
        quiet = self.other_cores < QUIET_CORES
        return {"quiet": quiet, "other_cores": round(self.other_cores, 2)}

    def _now(self) -> tuple[float, float, float]:
        return _busy_s(), _own_s(self._own_roots), time.monotonic()


def quiet_monitor(own_roots: Sequence[int] = ()) -> QuietMonitor:
    """Use as a context manager around the measured part."""
    return QuietMonitor(own_roots)


def measured(
    benchmark: str, rows: Sequence[Mapping[str, Any]], monitor: QuietMonitor
) -> dict[str, Any]:
    """The one object that a benchmark prints as JSON."""
    return {
        "benchmark": benchmark,
        "machine": machine(),
        "versions": versions(),
        "quiet": monitor.report(),
        "rows": [dict(row) for row in rows],
    }


def emit(
    benchmark: str, rows: Sequence[Mapping[str, Any]], monitor: QuietMonitor, as_json: bool = True
) -> None:
    """Print that object, or a table for people where `as_json` is false."""
    if as_json:
        print(json.dumps(measured(benchmark, rows, monitor)))
        return
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    print(f"quiet: {monitor.report()}")


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _own_s(own_roots: Sequence[int]) -> float:
    """CPU seconds of our processes: those that live, and those that they have waited for."""
    total = 0.0
    for process in _processes({psutil.Process().pid, *own_roots}):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
        # Of children that are gone; only Linux tells them apart.
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def _processes(roots: set[int]) -> Iterator[psutil.Process]:
    """The roots and all that they started, each once."""
    seen = set()
    for root in roots:
        try:
            family = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            if process.pid not in seen:
                seen.add(process.pid)
                yield process
