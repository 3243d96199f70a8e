"""The folder for what Coterie keeps between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where Coterie keeps what cannot lie beside a model: $COTERIE_CACHE or ~/.cache/coterie."""
    return Path(os.environ.get("COTERIE_CACHE") or "~/.cache/coterie").expanduser()
