"""The folder for what Coterie keeps between runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where Coterie keeps what cannot lie beside a model: $COTERIE_CACHE or ~/.cache/coterie.

    Whoever has no home has a folder of their own among the temporary files.
    """
    try:
        return Path(os.environ.get("COTERIE_CACHE") or "~/.cache/coterie").expanduser()
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"coterie-{os.getuid()}"


def is_there(path: Path) -> bool:
    """Whether a file can be seen; where its folder must not be looked into, it cannot.

    `Path.exists` raises there, as under the home folder of another user.
    """
    try:
        path.stat()
    except OSError:
        return False
    return True
