"""The request log: one JSON object a line for each HTTP request, without anybody's text."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec
import psutil

_FILE_BYTES = 64 * 1024**2
_OLD_FILES = 4
_DEAD_KEPT = 8
"""Processes that ended and whose files stay."""
_NAME = re.compile(r"requests-(\d+)\.jsonl(\.\d+)?")


class RequestLog:
    """Writes to files of its own, or into the log of the process."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` gets a file for each process, five of at most 64 MiB. Raises OSError.

        Files of processes that ended are removed here, all but those of the newest few.
        """
        if folder is None:
            self._logger = logging.getLogger("ray.serve")
            self._prefix = "request "
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"requests-{os.getpid()}.jsonl"
        _remove_old(folder)
        handler = _PrivateFiles(
            path, maxBytes=_FILE_BYTES, backupCount=_OLD_FILES, encoding="utf-8"
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._logger = logging.Logger("coterie.requests", logging.INFO)
        self._logger.addHandler(handler)
        self._prefix = ""

    def write(self, record: dict[str, Any]) -> None:
        """Add a line."""
        self._logger.info("%s%s", self._prefix, msgspec.json.encode(record).decode())


class _PrivateFiles(RotatingFileHandler):
    """Files that only their owner can read: they may hold prompts."""

    def _open(self) -> Any:
        def private(path: str, flags: int) -> int:
            descriptor = os.open(path, flags, 0o600)
            os.fchmod(descriptor, 0o600)  # one that was there before
            return descriptor

        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private)


def _remove_old(folder: Path) -> None:
    written_s: dict[int, float] = {}
    files: dict[int, list[Path]] = {}
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        pid = int(name.group(1))
        with contextlib.suppress(OSError):
            written_s[pid] = max(written_s.get(pid, 0.0), path.stat().st_mtime)
            files.setdefault(pid, []).append(path)
    dead = [pid for pid in files if pid != os.getpid() and not _lives(pid)]
    for pid in sorted(dead, key=lambda pid: written_s[pid], reverse=True)[_DEAD_KEPT:]:
        for path in files[pid]:
            with contextlib.suppress(OSError):
                path.unlink()


def _lives(pid: int) -> bool:
    try:
        return psutil.pid_exists(pid)
    except OverflowError:
        return False
