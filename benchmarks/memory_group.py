"""A hard memory limit for a benchmark's process: a child of our own memory control group.

Works with control groups of version 1 (`memory.limit_in_bytes`) and 2 (`memory.max`). What a
process in the group reads through the page cache counts too.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

_V1_ROOT = Path("/sys/fs/cgroup/memory")
_V2_ROOT = Path("/sys/fs/cgroup")


class NoMemoryGroupError(Exception):
    """This process may not make a memory group; says why and what would help."""


class MemoryGroup:
    """One group: `join` is for the child process, the rest for whoever made it."""

    def __init__(self, folder: Path, limit_bytes: int, version: int) -> None:
        self._folder = folder
        self._version = version
        self._write("memory.limit_in_bytes" if version == 1 else "memory.max", limit_bytes)
        # Without swap: what does not fit must be read again or fail.
        for name, value in (("memory.swappiness", 0), ("memory.swap.max", 0)):
            with contextlib.suppress(OSError):
                self._write(name, value)

    def join(self) -> None:
        """Put the calling process into the group. For `preexec_fn`."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        """Most memory that the group held at once, page cache included; 0 where nobody counts."""
        name = "memory.max_usage_in_bytes" if self._version == 1 else "memory.peak"
        try:
            return int((self._folder / name).read_text())
        except OSError:  # memory.peak came with Linux 5.19
            return 0

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value))


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group with that limit for the time of the block. Raises NoMemoryGroupError."""
    parent, version = _own_group()
    folder = parent / f"coterie-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoMemoryGroupError(
            f"cannot make a memory group in {parent}: {error.strerror}. This benchmark needs the "
            "right to make one: run it as root, or in a scope delegated to you "
            "(systemd-run --user --scope -p Delegate=yes)."
        ) from error
    try:
        try:
            group = MemoryGroup(folder, limit_bytes, version)
        except OSError as error:
            raise NoMemoryGroupError(
                f"cannot limit the memory of {folder}: {error}. The memory controller is not "
                "enabled for it; run as root, or enable it in cgroup.subtree_control."
            ) from error
        yield group
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _own_group() -> tuple[Path, int]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _V1_ROOT / path.lstrip("/"), 1
    for line in lines:
        if line.startswith("0::"):
            return _V2_ROOT / line[3:].lstrip("/"), 2
    raise NoMemoryGroupError("this system has no control groups; the benchmark needs Linux")
