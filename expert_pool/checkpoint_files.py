"""Finds the files of a model folder and reads their headers; refuses what cannot be served."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from core.errors import CheckpointError
from core.json_file import read_json_object
from expert_pool.safetensors_header import TensorEntry, read_header

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 16


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The safetensors files of one model and the tensors in them."""

    model_dir: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    layout_hash: bytes
    """Over config.json, the files' names and sizes, and their headers."""


def read_files(model_dir: Path) -> CheckpointFiles:
    """Reads every header in `model_dir`.

    Raises CheckpointError when the folder holds no whole safetensors checkpoint, names the missing
    shards or tensors, and refuses pickle and quantised checkpoints.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"Expected a model folder at {model_dir}, found none.")
    config = read_json(model_dir / "config.json")
    _refuse_quantised(model_dir, config)
    names, listed = _file_names(model_dir)
    tensors: dict[str, TensorEntry] = {}
    digest = xxhash.xxh3_128((model_dir / "config.json").read_bytes())
    for number, name in enumerate(names):
        path = model_dir / name
        raw, entries = read_header(path, number)
        digest.update(f"\n{name} {path.stat().st_size}\n".encode())
        digest.update(raw)
        for key in entries.keys() & tensors.keys():
            other = names[tensors[key].file]
            raise CheckpointError(f"Tensor {key} is in both {other} and {name}; expected one.")
        tensors.update(entries)
    lost = sorted(key for key in listed if key not in tensors)
    if lost:
        raise CheckpointError(
            f"{_INDEX} lists tensors that their files do not hold: "
            f"{', '.join(f'{key} ({listed[key]})' for key in lost[:8])}"
            f"{f' and {len(lost) - 8} more' if len(lost) > 8 else ''}. Fetch the model again."
        )
    files = tuple(model_dir / name for name in names)
    return CheckpointFiles(model_dir, files, tensors, digest.digest())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that must be there. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(
            f"Expected {path}, found none: {path.parent} is not a model folder in the "
            "Hugging Face layout."
        )
    return read_json_object(path)


def sampled_key(files: CheckpointFiles, chosen: Mapping[str, TensorEntry] | None = None) -> str:
    """Hex of xxh3_128 over the layout and samples of the tensors' bytes.

    Two models of one architecture have equal headers; samples tell them apart. With `chosen`, the
    first bytes of (up to 64 of) these tensors are sampled, else every file at 16 places.
    """
    digest = xxhash.xxh3_128(files.layout_hash)
    extents: list[tuple[int, int, int]] = []
    if chosen is None:
        for number, path in enumerate(files.files):
            last = max(0, path.stat().st_size - _SAMPLE_BYTES)
            extents += [
                (number, last * i // (_SAMPLES_PER_FILE - 1), _SAMPLE_BYTES)
                for i in range(_SAMPLES_PER_FILE)
            ]
    else:
        entries = sorted(chosen.values(), key=lambda entry: (entry.file, entry.offset))
        extents += [
            (entry.file, entry.offset, min(_SAMPLE_BYTES, entry.nbytes))
            for entry in entries[:: max(1, len(entries) // 64)]
        ]
    for number, group in itertools.groupby(extents, key=lambda extent: extent[0]):
        with files.files[number].open("rb", buffering=0) as stream:
            for _, offset, nbytes in group:
                stream.seek(offset)
                digest.update(stream.read(nbytes))
    return digest.hexdigest()


def _refuse_quantised(model_dir: Path, config: Mapping[str, Any]) -> None:
    text = config.get("text_config") or {}
    quantised = config.get("quantization_config") or text.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown")
        raise CheckpointError(
            f"{model_dir} is quantised ({method}). Expected bf16, fp16 or fp32 weights: this "
            "version reads no quantised encoding. Use the unquantised checkpoint."
        )


def _file_names(model_dir: Path) -> tuple[list[str], dict[str, str]]:
    """File names in order, and the tensors that an index lists with their files."""
    if (model_dir / _SINGLE).is_file():
        return [_SINGLE], {}
    if not (model_dir / _INDEX).is_file():
        present = sorted(path.name for path in model_dir.iterdir() if path.is_file())
        pickles = [name for name in present if name.endswith(_PICKLES)]
        if pickles:
            raise CheckpointError(
                f"{model_dir} holds its weights as pickles ({', '.join(pickles[:3])}), which can "
                "run code when they are read. Expected safetensors: convert the model first, or "
                "take a revision that has them."
            )
        raise CheckpointError(
            f"Expected {_SINGLE} or {_INDEX} in {model_dir}, found "
            f"{', '.join(present[:12]) or 'no files'}."
        )
    weight_map = read_json(model_dir / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"Expected a weight_map in {model_dir / _INDEX}, found none.")
    names = sorted({str(name) for name in weight_map.values()})
    bad = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if bad:
        raise CheckpointError(
            f"{_INDEX} in {model_dir} names {', '.join(bad[:4])}; expected safetensors files in "
            "the model folder itself."
        )
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} shards are missing from {model_dir}: "
            f"{', '.join(missing)}. Fetch the model again."
        )
    return names, {str(key): str(name) for key, name in weight_map.items()}
