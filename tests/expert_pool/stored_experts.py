"""Reads experts through the index as the pool does, and edits checkpoints for tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from expert_pool.checkpoint_index import CheckpointIndex, ExpertRecord

Tensors = dict[str, torch.Tensor]


def read_pieces(index: CheckpointIndex, record: ExpertRecord) -> list[torch.Tensor]:
    """The bytes of each piece of a record, as uint8 tensors."""
    raw = []
    for piece in record.pieces:
        with index.files[piece.file].open("rb") as stream:
            stream.seek(piece.offset)
            raw.append(torch.frombuffer(bytearray(stream.read(piece.nbytes)), dtype=torch.uint8))
    return raw


def assembled(index: CheckpointIndex, ordinal: int, expert: int) -> Tensors:
    """One expert's parameters by name, out of a slot that `assemble` filled."""
    layer = index.layers[ordinal]
    record = index.record(ordinal, expert)
    slot = torch.zeros(layer.slot_bytes, dtype=torch.uint8)
    index.assemble(record, read_pieces(index, record), slot)
    return slot_params(index, ordinal, slot)


def placed(index: CheckpointIndex, ordinal: int, expert: int) -> Tensors:
    """The same out of a slot into which the pieces were read directly."""
    layer = index.layers[ordinal]
    raw = read_pieces(index, index.record(ordinal, expert))
    slot = torch.zeros(layer.slot_bytes, dtype=torch.uint8)
    for piece, offset in index.placement(ordinal) or ():
        slot[offset : offset + raw[piece].numel()] = raw[piece]
    return slot_params(index, ordinal, slot)


def slot_params(index: CheckpointIndex, ordinal: int, slot: torch.Tensor) -> Tensors:
    """A filled slot viewed as parameters."""
    return {
        param.name: slot[param.slot_offset : param.slot_offset + param.nbytes]
        .view(getattr(torch, param.dtype))
        .view(param.shape)
        for param in index.layers[ordinal].params
    }


def edited_copy(source: Path, target: Path, edit: Callable[[Tensors], None]) -> Path:
    """A copy of a one-file checkpoint with its tensors changed in place by `edit`."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def edit_config(folder: Path, **changes: object) -> None:
    """Changes fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
