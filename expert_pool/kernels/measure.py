"""Times native against torch over a layer's shape, with experts that no cache holds."""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.model_shape import PARAM_ALIGN_BYTES, SLOT_ALIGN_BYTES, align_up
from expert_pool.checkpoint_index import LayerSpec, ParamSpec
from expert_pool.grouped_linear import ExpertGroup
from expert_pool.host_memory import available_bytes
from expert_pool.kernels.activation import Activation
from expert_pool.kernels.build import fingerprint
from expert_pool.kernels.kept_table import table_for
from expert_pool.kernels.layer_kernel import LayerKernel
from expert_pool.kernels.library import NativeKernels
from expert_pool.kernels.row_table import RowTable, measured_table
from expert_pool.slots import SlotArena

_ARENA_BYTES = 64 * 1024**2
_EXPERT_BYTES = 16 * 1024**2
_LIMIT_S = 0.4
"""Of this thread's own time, so that other programs do not cut it short."""
_WALL_LIMIT_S = 3.0
_ROUNDS = 3


def row_table(
    kernels: NativeKernels, layer: LayerSpec, module: Any, activation: Activation
) -> RowTable:
    """The table of this machine for layers of this shape, measured in about a second if unknown."""
    machine = {
        **_machine(kernels),
        "experts": [(param.name, list(param.shape)) for param in layer.params],
        "activation": asdict(activation),
    }
    return table_for(machine, lambda: _Contest(kernels, layer, module, activation).table())


class _Limit:
    """Whether a measurement has taken long enough."""

    def __init__(self) -> None:
        self._began = time.thread_time(), time.monotonic()

    def is_over(self) -> bool:
        own, wall = self._began
        return time.thread_time() - own > _LIMIT_S or time.monotonic() - wall > _WALL_LIMIT_S


def linear_table(kernels: NativeKernels, layers: Sequence[torch.nn.Linear]) -> RowTable:
    """The same for linear layers: measured with the shape that most of their weights have."""
    weights: Counter[tuple[int, ...]] = Counter()
    for layer in layers:
        weights[tuple(layer.weight.shape)] += layer.weight.numel()
    shape = weights.most_common(1)[0][0]
    machine = {**_machine(kernels), "linear": list(shape)}
    return table_for(machine, lambda: _measured_linear(kernels, shape))


def _machine(kernels: NativeKernels) -> dict[str, Any]:
    return {
        "processor": processor(),
        "instructions": kernels.name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": fingerprint(),
    }


def processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [x.split(":", 1)[1].strip() for x in lines if x.startswith(("model name", "CPU part"))]
    return named[0] if named else platform.processor() or platform.machine()


class _Contest:
    """A few experts of a layer's shape, narrower where they are huge, and rows for them."""

    def __init__(
        self, kernels: NativeKernels, layer: LayerSpec, module: Any, activation: Activation
    ) -> None:
        self._module = module
        self._is_transposed = bool(module.is_transposed)
        hidden, inner = next(p.shape for p in layer.params if p.name == "down_proj")
        if self._is_transposed:
            hidden, inner = inner, hidden
        inner = min(inner, max(64, _EXPERT_BYTES // (6 * hidden) // 64 * 64))
        params, slot_bytes = _narrowed(layer, hidden, inner, self._is_transposed)
        self._experts = int(np.clip(_spare_bytes() // slot_bytes, 2, 64))
        self._hidden = hidden
        self._arena = SlotArena(params, slot_bytes, self._experts, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        one = self._arena.slot(0).view(torch.bfloat16)
        one.copy_(torch.randn(one.numel(), generator=generator) * 0.02)
        for slot in range(1, self._experts):
            self._arena.slot(slot).copy_(self._arena.slot(0))
        self._kernel = LayerKernel(kernels, self._arena, params, activation, self._is_transposed)
        self._generator = generator

    def table(self) -> RowTable:
        """Measured until torch wins or the time is over."""
        return measured_table(self._seconds, _Limit().is_over)

    def _seconds(self, rows: int) -> tuple[float, float]:
        """Native and torch over all experts with `rows` rows each: the best of a few, in turn."""
        pairs = np.arange(rows * self._experts, dtype=np.int64)
        hidden = torch.randn((pairs.size, self._hidden), generator=self._generator).bfloat16()
        counts = np.full(self._experts, rows, dtype=np.int64)
        best = [float("inf"), float("inf")]
        for _ in range(_ROUNDS):
            for at, compute in enumerate((self._native, self._torch)):
                group = ExpertGroup(self._arena, np.arange(counts.size), counts, hidden.device)
                began = time.perf_counter()
                compute(group, hidden, pairs)
                best[at] = min(best[at], time.perf_counter() - began)
        return best[0], best[1]

    def _native(self, group: ExpertGroup, hidden: torch.Tensor, pairs: np.ndarray) -> None:
        by_pair = torch.empty_like(hidden)
        self._kernel.apply(group, hidden, pairs, 1, by_pair)
        self._kernel.combine(by_pair, torch.ones((pairs.size, 1)))

    def _torch(self, group: ExpertGroup, hidden: torch.Tensor, pairs: np.ndarray) -> None:
        module, order = self._module, torch.from_numpy(pairs)
        name = "gate_up_proj" if module.has_gate else "up_proj"
        up = group.linear(hidden.index_select(0, order), name, self._is_transposed)
        inner = group.activate(module._apply_gate if module.has_gate else module.act_fn, up)
        out = group.linear(inner, "down_proj", self._is_transposed) * torch.ones((pairs.size, 1))
        out.index_select(0, order).view(pairs.size, 1, -1).sum(dim=1).to(hidden.dtype)


def _spare_bytes() -> int:
    """What a measurement may take for a moment."""
    return min(_ARENA_BYTES, available_bytes() // 4)


def _measured_linear(kernels: NativeKernels, shape: tuple[int, ...]) -> RowTable:
    """As many weights of a shape, cut where it is huge, as no cache holds."""
    width, depth = shape
    width = min(width, max(64, _EXPERT_BYTES // (2 * depth)))
    count = int(np.clip(_spare_bytes() // (2 * width * depth), 2, 64))
    generator = torch.Generator().manual_seed(0)
    one = (torch.randn((width, depth), generator=generator) * 0.02).bfloat16()
    weights = one.repeat(count, 1, 1)

    def native(rows: torch.Tensor, weight: torch.Tensor) -> None:
        kernels.linear(rows, weight, None)

    def stock(rows: torch.Tensor, weight: torch.Tensor) -> None:
        torch.nn.functional.linear(rows, weight)

    def seconds(rows: int) -> tuple[float, float]:
        values = torch.randn((rows, depth), generator=generator).bfloat16()
        best = [float("inf"), float("inf")]
        for _ in range(_ROUNDS):
            for at, compute in enumerate((native, stock)):
                began = time.perf_counter()
                for weight in weights:
                    compute(values, weight)
                best[at] = min(best[at], time.perf_counter() - began)
        return best[0], best[1]

    return measured_table(seconds, _Limit().is_over)


def _narrowed(
    layer: LayerSpec, hidden: int, inner: int, is_transposed: bool
) -> tuple[list[ParamSpec], int]:
    """A slot's parameters with the intermediate width `inner`, and its bytes."""
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (2 * inner, hidden),
        "gate_up_proj_bias": (2 * inner,),
        "up_proj": (inner, hidden),
        "up_proj_bias": (inner,),
        "down_proj": (hidden, inner),
        "down_proj_bias": (hidden,),
    }
    params, end = [], 0
    for param in layer.params:
        shape = shapes[param.name]
        if is_transposed:
            shape = shape[::-1]
        nbytes = 2 * math.prod(shape)
        params.append(ParamSpec(param.name, shape, param.dtype, end, nbytes))
        end = align_up(end + nbytes, PARAM_ALIGN_BYTES)
    return params, align_up(end, SLOT_ALIGN_BYTES)
