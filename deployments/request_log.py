"""The request log: one JSON object a line for each HTTP request, without anybody's text."""

from __future__ import annotations

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec

_FILE_BYTES = 64 * 1024**2
_OLD_FILES = 4


class RequestLog:
    """Writes to files of its own, or into the log of the process."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` gets a file for each process, five of at most 64 MiB. Raises OSError."""
        if folder is None:
            self._logger = logging.getLogger("ray.serve")
            self._prefix = "request "
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"requests-{os.getpid()}.jsonl"
        handler = RotatingFileHandler(path, maxBytes=_FILE_BYTES, backupCount=_OLD_FILES)
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._logger = logging.Logger("coterie.requests", logging.INFO)
        self._logger.addHandler(handler)
        self._prefix = ""

    def write(self, record: dict[str, Any]) -> None:
        """Add a line."""
        self._logger.info("%s%s", self._prefix, msgspec.json.encode(record).decode())
