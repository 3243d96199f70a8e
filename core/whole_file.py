"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_whole(
    path: Path, write: Callable[[IO[bytes]], object], mode: int = 0o600, durable: bool = True
) -> None:
    """Replaces `path` by what `write` puts into a stream; its folder is made where there is none.

    A reader sees the old file or the new one. A full disk, a crash or whatever `write` raises
    leaves the old one, and nothing beside it. `durable`: it is on the disk on return, which takes
    time. Raises OSError, and what `write` raises.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
