"""How much memory this machine, or the memory group we run in, has to spare."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be had now, page cache that can be given up included.

    Limits of the control groups (versions 1 and 2) that this process is in count too.
    """
    return min([int(psutil.virtual_memory().available), *_group_room(Path("/proc/self/cgroup"))])


def _group_room(membership: Path, root: Path = _GROUPS) -> list[int]:
    """What each limited memory group on the way to ours leaves."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "file", "shmem")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_cache",
                "total_shmem",
            )
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            room = _room(folder, *names)
            if room is not None:
                found.append(room)
            if folder == base:
                break
    return found


def _room(folder: Path, limit: str, usage: str, cache: str, shared: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not most.isdigit():  # "max"
        return None
    reclaimable = int(stat.get(cache, 0)) - int(stat.get(shared, 0))
    return max(0, int(most) - used + max(0, reclaimable))
