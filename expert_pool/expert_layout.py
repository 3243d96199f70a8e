"""Where the experts of one MoE layer lie in the checkpoint, and how their bytes become parameters.

A *piece* is one contiguous run of bytes of one expert: a whole tensor where each expert has its
own, a slice where the experts lie stacked in one tensor. Locations are kept in arrays, 12 bytes a
piece; nothing is kept for each expert beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from core.errors import CheckpointError
from expert_pool import encodings
from expert_pool.safetensors_header import TensorEntry
from expert_pool.transformers_private import TargetSource

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import ParamSpec

_KEEPS_EXPERTS_APART = {"MergeModulelist", "Concatenate", "Transpose", "Interleave", "Chunk"}
"""Converter operations that, in dimensions after the first, treat each expert by itself."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The same piece of every expert: `shape` is what one expert's bytes are viewed as."""

    files: np.ndarray
    offsets: np.ndarray
    nbytes: int
    encoding: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """One conversion: `inputs` are (source pattern, piece), `outputs` full names to ParamSpec."""

    source: TargetSource
    inputs: tuple[tuple[str, int], ...]
    outputs: dict[str, ParamSpec]


class ExpertLayout:
    """Pieces and conversions of the experts of one layer."""

    def __init__(self, module_name: str, num_experts: int, params: Sequence[ParamSpec]) -> None:
        self.num_experts = num_experts
        self._params = {f"{module_name}.{param.name}": param for param in params}
        self._runs: list[_Run] = []
        self._recipes: list[_Recipe] = []

    def add(self, source: TargetSource, entries: dict[str, TensorEntry]) -> None:
        """Adds the tensors that feed one or more of the layer's parameters.

        Raises CheckpointError for a missing or misshapen tensor and for a conversion that mixes
        experts.
        """
        operations = [] if source.converter is None else list(source.converter.operations)
        unknown = {type(op).__name__ for op in operations} - _KEEPS_EXPERTS_APART
        if unknown:
            raise CheckpointError(
                f"{source.target} is converted by {', '.join(sorted(unknown))}, which may mix "
                "experts; such checkpoints cannot be read one expert at a time."
            )
        separate = bool(operations) and type(operations[0]).__name__ == "MergeModulelist"
        patterns = [""] if source.converter is None else source.converter.source_patterns
        inputs = []
        for pattern in patterns:
            keys = source.keys.get(pattern, [])
            if separate:
                self._check_complete(source, pattern, keys)
            elif len(keys) != 1:
                raise CheckpointError(
                    f"{source.target} needs one tensor like {pattern!r}, found {keys or 'none'}."
                )
            inputs.append((pattern, len(self._runs)))
            self._runs.append(self._run(keys, entries, separate))
        outputs = {name: self._params[name] for name in source.outputs().values()}
        # Without the names of its tensors: there are thousands, and they are needed no more.
        recipe = _Recipe(TargetSource(source.target, source.converter), tuple(inputs), outputs)
        self._check_shapes(recipe, source, entries)
        self._recipes.append(recipe)

    def _check_complete(self, source: TargetSource, pattern: str, keys: list[str]) -> None:
        numbers = [_expert_number(key) for key in keys]
        if numbers == list(range(self.num_experts)):
            return
        if not keys:
            raise CheckpointError(
                f"{source.target} needs tensors like {pattern!r} for {self.num_experts} experts, "
                "the checkpoint has none. The checkpoint is incomplete: fetch it again."
            )
        by_number = dict(zip(numbers, keys, strict=True))
        missing = [n for n in range(self.num_experts) if n not in by_number]
        if missing:
            names = [_with_expert_number(keys[0], n) for n in missing]
            raise CheckpointError(
                f"The checkpoint lacks {len(names)} of the tensors that {source.target} needs: "
                f"{', '.join(names[:8])}. The checkpoint is incomplete: fetch it again."
            )
        extra = [
            key
            for number, key in zip(numbers, keys, strict=True)
            if number >= len(numbers) or number >= self.num_experts
        ]
        raise CheckpointError(
            f"{source.target} has {self.num_experts} experts by the model's configuration, the "
            f"checkpoint has tensors that nobody reads: {', '.join(extra[:8] or keys[:8])}."
        )

    def _run(self, keys: list[str], entries: dict[str, TensorEntry], separate: bool) -> _Run:
        first = entries[keys[0]]
        for key in keys:
            entry = entries[key]
            if entry.shape != first.shape or entry.encoding != first.encoding:
                raise CheckpointError(
                    f"Tensor {key} is {list(entry.shape)} in {entry.encoding}, but {keys[0]} is "
                    f"{list(first.shape)} in {first.encoding}: experts of one layer must be alike."
                )
        if first.encoding not in encodings.COMPUTE_DTYPES:
            raise CheckpointError(
                f"Tensor {keys[0]} holds an expert in {first.encoding}; expected one of "
                f"{', '.join(encodings.COMPUTE_DTYPES)}: this version reads no quantised encoding."
            )
        if separate:
            files = np.array([entries[key].file for key in keys], dtype=np.int32)
            offsets = np.array([entries[key].offset for key in keys], dtype=np.int64)
            return _Run(files, offsets, first.nbytes, first.encoding, first.shape)
        if not first.shape or first.shape[0] != self.num_experts:
            raise CheckpointError(
                f"Tensor {keys[0]} has the shape {list(first.shape)}; expected its first "
                f"dimension to count {self.num_experts} experts."
            )
        nbytes = first.nbytes // self.num_experts
        files = np.full(self.num_experts, first.file, dtype=np.int32)
        offsets = first.offset + nbytes * np.arange(self.num_experts, dtype=np.int64)
        return _Run(files, offsets, nbytes, first.encoding, (1, *first.shape[1:]))

    def _check_shapes(
        self, recipe: _Recipe, source: TargetSource, entries: dict[str, TensorEntry]
    ) -> None:
        probe = {
            pattern: [torch.empty(self._runs[piece].shape, device="meta")]
            for pattern, piece in recipe.inputs
        }
        shown = [key for keys in source.keys.values() for key in keys[:1]]
        found = ", ".join(f"{key} {list(entries[key].shape)}" for key in shown)
        try:
            results = source.convert(probe, None)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{source.target} cannot be made from {found}: {error}"
            ) from error
        for name, param in recipe.outputs.items():
            if name not in results or tuple(results[name].shape) != (1, *param.shape):
                made = list(results[name].shape[1:]) if name in results else "nothing"
                raise CheckpointError(
                    f"{name} of one expert should have the shape {list(param.shape)}, the "
                    f"checkpoint makes {made} from {found}."
                )

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert's pieces."""
        return sum(run.nbytes for run in self._runs)

    def pieces(self, expert: int) -> list[tuple[int, int, int]]:
        """(file, absolute offset, bytes) of each piece of one expert."""
        return [(int(r.files[expert]), int(r.offsets[expert]), r.nbytes) for r in self._runs]

    @cached_property
    def placement(self) -> tuple[tuple[int, int], ...] | None:
        """(piece, slot offset) of each piece where its bytes are used unchanged, else None."""
        placed = []
        for recipe in self._recipes:
            converter = recipe.source.converter
            for operation in [] if converter is None else converter.operations:
                name, dim = type(operation).__name__, getattr(operation, "dim", None)
                if (name, dim) not in (("MergeModulelist", 0), ("Concatenate", 1)):
                    return None
            (param,) = recipe.outputs.values()
            offset = param.slot_offset
            for _, piece in recipe.inputs:
                run = self._runs[piece]
                if run.encoding != param.dtype:
                    return None
                placed.append((piece, offset))
                offset += run.nbytes
        return tuple(placed)

    def assemble(self, raw: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        """Writes one expert's parameters into `slot` from the bytes of its pieces.

        `raw` holds one uint8 tensor a piece, `slot` is uint8 [slot_bytes]. Casts come first, then
        the converter's operations, as in stock loading.
        """
        for recipe in self._recipes:
            (dtype,) = {param.dtype for param in recipe.outputs.values()}
            tensors = {
                pattern: [_view(raw[piece], self._runs[piece]).to(encodings.dtype_of(dtype))]
                for pattern, piece in recipe.inputs
            }
            results = recipe.source.convert(tensors, None)
            for name, param in recipe.outputs.items():
                target = slot[param.slot_offset : param.slot_offset + param.nbytes]
                target = target.view(encodings.dtype_of(param.dtype)).view(param.shape)
                target.copy_(results[name][0])


def _view(raw: torch.Tensor, run: _Run) -> torch.Tensor:
    dtype = encodings.dtype_of(run.encoding)
    if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw[: math.prod(run.shape) * dtype.itemsize].view(dtype).view(run.shape)


def _expert_number(key: str) -> int:
    return next((int(part) for part in reversed(key.split(".")) if part.isdigit()), -1)


def _with_expert_number(key: str, number: int) -> str:
    parts = key.split(".")
    place = next(i for i in reversed(range(len(parts))) if parts[i].isdigit())
    return ".".join([*parts[:place], str(number), *parts[place + 1 :]])
