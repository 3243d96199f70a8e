"""The compiled kernels, called through ctypes on torch's own threads."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from expert_pool.kernels.shared_object import BEST, find_kernels, load_library

_int64, _address = ctypes.c_int64, ctypes.c_void_p
_NO_MEMORY = 1


class NativeLayer(ctypes.Structure):
    """`struct Layer` of native/experts.h."""

    _fields_ = [
        ("hidden", _int64),
        ("inner", _int64),
        ("gated", _int64),
        ("activation", _int64),
        ("transposed", _int64),
        ("interleaved", _int64),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("arena", _address),
        ("slot_bytes", _int64),
        ("up", _int64),
        ("up_bias", _int64),
        ("down", _int64),
        ("down_bias", _int64),
    ]


class NativeCall(ctypes.Structure):
    """`struct Call` of native/experts.h."""

    _fields_ = [
        ("rows", _address),
        ("pairs", _address),
        ("slots", _address),
        ("counts", _address),
        ("experts", _int64),
        ("top_k", _int64),
        ("placed", _int64),
        ("scratch", _address),
        ("out", _address),
        ("threads", _int64),
    ]


class NativeKernels:
    """One instruction set of the library."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self._kernels = address
        self._experts = library.coterie_experts
        self._experts.argtypes = [_address] * 4
        self._experts.restype = ctypes.c_int32
        self._combine = library.coterie_combine
        self._combine.argtypes = [*[_address] * 5, *[_int64] * 4]
        self._combine.restype = ctypes.c_int32
        self._linear = library.coterie_linear
        self._linear.argtypes = [*[_address] * 6, *[_int64] * 4]
        self._linear.restype = ctypes.c_int32
        self.name: str = library.coterie_kernels_name(address).decode()
        """The instruction set: "avx512_bf16", "avx2" or "generic"."""
        self._parallel_for = _torch_parallel_for()

    def experts(self, layer: NativeLayer, call: NativeCall) -> None:
        """The experts of a call. What the call points to must outlive it."""
        _check(
            self._experts(
                self._kernels, self._parallel_for, ctypes.byref(layer), ctypes.byref(call)
            )
        )

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`[..., in]` times `[out, in]`, plus `[out]`: all bf16, sums in float32, rounded once.

        The weight and bias are contiguous. Raises ValueError where shapes do not fit.
        """
        width, depth = weight.shape
        if rows.shape[-1] != depth or not depth or not (bias is None or bias.shape == (width,)):
            raise ValueError(
                f"expected rows [..., {depth}] and a bias [{width}] for a weight [{width}, "
                f"{depth}], found rows {list(rows.shape)}"
                + ("" if bias is None else f" and a bias {list(bias.shape)}")
            )
        rows = rows.contiguous()
        out = rows.new_empty((*rows.shape[:-1], width))
        _check(
            self._linear(
                self._kernels,
                self._parallel_for,
                rows.data_ptr(),
                weight.data_ptr(),
                None if bias is None else bias.data_ptr(),
                out.data_ptr(),
                rows.numel() // depth,
                depth,
                width,
                torch.get_num_threads(),
            )
        )
        return out

    def combine(self, by_pair: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[T * K, H]` bf16 and the router's weights `[T, K]` to the weighted sums `[T, H]`.

        Sums are made in float32, in router order, and rounded once.
        """
        rows, top_k = weights.shape
        if by_pair.shape[0] != rows * top_k:
            raise ValueError(f"expected {rows * top_k} pairs, found {by_pair.shape[0]}")
        by_pair = by_pair.contiguous()
        # Exact from bf16; finer weights than float32 there are none.
        weights = weights.to(torch.float32).contiguous()
        out = by_pair.new_empty((rows, by_pair.shape[-1]))
        _check(
            self._combine(
                self._kernels,
                self._parallel_for,
                by_pair.data_ptr(),
                weights.data_ptr(),
                out.data_ptr(),
                rows,
                out.shape[-1],
                top_k,
                torch.get_num_threads(),
            )
        )
        return out


def _check(failed: int) -> None:
    if failed == _NO_MEMORY:
        raise MemoryError("no memory for the experts' work list")
    if failed:
        raise RuntimeError("torch's threads failed; expected torch_parallel_for to return 0")


@functools.cache
def _torch_parallel_for() -> int | None:
    """Address of torch's parallel_for of its stable C ABI; without it, one thread computes."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).torch_parallel_for, _address).value
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def open_kernels(name: str = BEST) -> NativeKernels:
    """The kernels of an instruction set ("native": the best there is), loaded once.

    Raises BuildError where the library was not built, cannot be loaded, or has none that this
    processor runs.
    """
    library = load_library()
    return NativeKernels(library, find_kernels(library, name))
