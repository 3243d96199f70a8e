"""Small JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file. Raises CheckpointError otherwise."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"expected an object in {path}, found {type(value).__name__}")
    return value
