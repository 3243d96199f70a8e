"""Small JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file. Raises CheckpointError otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"Expected an object in {path}, found {type(value).__name__}.")
    return value
