"""How values are encoded in safetensors files, and what torch calls the same encodings."""

from __future__ import annotations

import torch

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Encodings of whole bytes; four-bit ones have no place among tensors that are read in place."""

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes that a model can be computed in."""


def is_known(encoding: str) -> bool:
    """Whether a safetensors dtype string is one whose bytes can be read as a torch tensor."""
    return encoding in _TORCH_NAMES


def torch_name(encoding: str) -> str:
    """The torch dtype name of a safetensors dtype, such as "bfloat16" for "BF16"."""
    return _TORCH_NAMES[encoding]


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name such as "bfloat16"."""
    return getattr(torch, name)


def name_of(dtype: torch.dtype) -> str:
    """The short name of a torch dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def itemsize(name: str) -> int:
    """Bytes of one value of the torch dtype called `name`."""
    return dtype_of(name).itemsize
