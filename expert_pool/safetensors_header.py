"""Reads the header of a safetensors file: which tensor lies where. No tensor is loaded.

Format: 8 bytes little-endian header length n, n bytes of JSON, then the tensors' bytes; the JSON's
offsets count from the end of the header.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import CheckpointError
from expert_pool import encodings

_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The format's own limit."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: `offset` is absolute in the file, `encoding` the torch dtype name."""

    file: int
    offset: int
    nbytes: int
    encoding: str
    shape: tuple[int, ...]


def read_header(path: Path, file: int) -> tuple[bytes, dict[str, TensorEntry]]:
    """The raw header of `path` and its tensors by name; `file` is put into each entry.

    Raises CheckpointError when the file is not a whole safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path} is not a safetensors file, or was cut short: {size} bytes, of which "
                    f"the header alone should take {length}. Fetch the file again."
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error
    try:
        table = json.loads(raw)
        entries = {
            name: _entry(path, file, 8 + length, size, name, fields)
            for name, fields in table.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The header of {path} is not readable ({error!r}). Fetch the file again."
        ) from error
    return raw, entries


def _entry(
    path: Path, file: int, data_start: int, size: int, name: str, fields: dict[str, Any]
) -> TensorEntry:
    encoding, (begin, end) = fields["dtype"], fields["data_offsets"]
    shape = tuple(int(dim) for dim in fields["shape"])
    if not isinstance(encoding, str) or not encodings.is_known(encoding):
        raise CheckpointError(f"{path}: tensor {name} has the unknown encoding {encoding!r}.")
    torch_name = encodings.torch_name(encoding)
    if end - begin != math.prod(shape) * encodings.itemsize(torch_name):
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} in {encoding} does not fill the "
            f"{end - begin} bytes that the header gives it. Fetch the file again."
        )
    if data_start + end > size:
        raise CheckpointError(
            f"{path} was cut short: tensor {name} ends at byte {data_start + end}, the file has "
            f"{size}. Fetch the file again."
        )
    return TensorEntry(file, data_start + begin, end - begin, torch_name, shape)
