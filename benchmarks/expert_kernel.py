"""One layer of experts and one linear layer: `python -m benchmarks.expert_kernel`.

Native kernels against torch. Experts (64, top 8, the shape of moe-s unless --hidden and --inner
say otherwise) lie in slots of more memory than caches hold; each round computes another layer.
Torch is what computes where native does not: grouped_mm over the same slots. Native and torch
alternate, so that whatever else the machine does meets both alike; medians. gb_s is weights read a
second by native. With --cpu-time one thread is measured by its own time, which other programs
disturb less.
"""

from __future__ import annotations

import os

from core.torch_environment import unset_variables

os.environ.update(unset_variables())  # read once, when torch is loaded

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from app.measurement import emit, quiet_monitor
from core.model_shape import PARAM_ALIGN_BYTES, SLOT_ALIGN_BYTES, align_up
from expert_pool.checkpoint_index import ParamSpec
from expert_pool.experts_forward import apply_with_torch
from expert_pool.grouped_linear import ExpertGroup
from expert_pool.kernels.activation import activation_of
from expert_pool.kernels.layer_kernel import LayerKernel
from expert_pool.kernels.library import NativeKernels, open_kernels
from expert_pool.slots import SlotArena

EXPERTS = 64
TOP_K = 8
LAYERS = 4
LAYOUTS = ("rows", "llama4", "gpt_oss")
_ALPHA, _LIMIT = 1.702, 7.0


def slots(hidden: int, inner: int, layout: str) -> tuple[SlotArena, list[ParamSpec]]:
    """The experts of a few layers, random."""
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }
    if layout != "rows":
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if layout == "gpt_oss":
        shapes |= {"gate_up_proj_bias": (2 * inner,), "down_proj_bias": (hidden,)}
    params, nbytes = [], 0
    for name, shape in shapes.items():
        params.append(ParamSpec(name, shape, "bfloat16", nbytes, 2 * math.prod(shape)))
        nbytes = align_up(nbytes + 2 * math.prod(shape), PARAM_ALIGN_BYTES)
    nbytes = align_up(nbytes, SLOT_ALIGN_BYTES)
    arena = SlotArena(params, nbytes, LAYERS * EXPERTS, torch.device("cpu"))
    one = arena.slot(0).view(torch.bfloat16)
    one.copy_(torch.randn(one.numel(), generator=torch.Generator().manual_seed(0)) * 0.02)
    for number in range(1, LAYERS * EXPERTS):
        arena.slot(number).copy_(arena.slot(0))
    return arena, params


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    first, second = gate_up.chunk(2, dim=-1)
    return functional.silu(first) * second


def clamped_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """As transformers' GptOssExperts."""
    first, second = gate_up[..., ::2], gate_up[..., 1::2]
    first = first.clamp(min=None, max=_LIMIT)
    second = second.clamp(min=-_LIMIT, max=_LIMIT)
    return (second + 1) * (first * torch.sigmoid(first * _ALPHA))


def experts_module(layout: str) -> SimpleNamespace:
    """What stock has beside the parameters."""
    return SimpleNamespace(
        has_gate=True,
        is_transposed=layout != "rows",
        has_post_expert_norm=False,
        _apply_gate=clamped_gate if layout == "gpt_oss" else gate,
        alpha=_ALPHA,
        limit=_LIMIT,
    )


def contest(
    first: Callable[[int], object],
    second: Callable[[int], object],
    rounds: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Median seconds of each, called in turn with the number of the round."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 2):
        for compute, taken in zip((first, second), times, strict=True):
            began = clock()
            compute(number)
            taken.append(clock() - began)
    return statistics.median(times[0][2:]), statistics.median(times[1][2:])


def experts_row(
    kernels: NativeKernels,
    arena: SlotArena,
    params: list[ParamSpec],
    tokens: int,
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """`tokens` rows of a layer."""
    module = experts_module(options.layout)
    activation = activation_of(module)
    if activation is None:
        raise RuntimeError("expected an activation that the kernels know")
    kernel = LayerKernel(kernels, arena, params, activation, module.is_transposed)
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn((tokens, options.hidden), generator=generator).bfloat16()
    chosen = torch.rand((tokens, EXPERTS), generator=generator).topk(TOP_K).indices.reshape(-1)
    order = np.argsort(chosen.numpy(), kind="stable")
    counts = np.bincount(chosen.numpy(), minlength=EXPERTS)
    active = np.flatnonzero(counts)

    def group(number: int) -> ExpertGroup:
        first = number % LAYERS * EXPERTS
        return ExpertGroup(arena, active + first, counts[active], hidden.device)

    def native(number: int) -> None:
        by_pair = hidden.new_empty((order.size, options.hidden))
        kernel.apply(group(number), hidden, order, TOP_K, by_pair)

    def with_torch(number: int) -> None:
        rows = hidden.index_select(0, torch.from_numpy(order // TOP_K))
        apply_with_torch(module, group(number), rows)

    native_s, torch_s = contest(native, with_torch, options.rounds, clock)
    return {
        "what": "experts" if options.layout == "rows" else f"experts, {options.layout}",
        "rows": tokens,
        "experts": int(active.size),
        "native_ms": round(native_s * 1e3, 3),
        "torch_ms": round(torch_s * 1e3, 3),
        "ratio": round(torch_s / native_s, 2),
        "gb_s": round(active.size * arena.slot_bytes / native_s / 1e9, 1),
    }


def linear_row(
    kernels: NativeKernels, rows: int, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, Any]:
    """`rows` rows of a square linear layer; the weights of many pass by."""
    size = options.hidden
    weights = torch.randn((64, size, size), generator=torch.Generator().manual_seed(1)) * 0.02
    weights = weights.bfloat16()
    values = torch.randn((rows, size)).bfloat16()

    def native(number: int) -> None:
        for weight in weights:
            kernels.linear(values, weight, None)

    def with_torch(number: int) -> None:
        for weight in weights:
            functional.linear(values, weight)

    native_s, torch_s = contest(native, with_torch, options.rounds // 2, clock)
    return {
        "what": "linear",
        "rows": rows,
        "experts": None,
        "native_ms": round(native_s * 1e3 / len(weights), 4),
        "torch_ms": round(torch_s * 1e3 / len(weights), 4),
        "ratio": round(torch_s / native_s, 2),
        "gb_s": round(weights.nbytes / native_s / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kernel", default="native", help="native, avx2 or generic")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="rows",
        help="how weights lie: rows of outputs, or transposed as those of llama4 or gpt_oss",
    )
    parser.add_argument("--rows", default="1,4,16,32,64,256", help="comma-separated")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by its own time")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    kernels = open_kernels(options.kernel)
    print(f"instructions: {kernels.name}", file=sys.stderr)
    sizes = [int(size) for size in options.rows.split(",")]
    arena, params = slots(options.hidden, options.inner, options.layout)
    rows = []
    with quiet_monitor() as monitor:
        for tokens in sizes:
            rows.append(experts_row(kernels, arena, params, tokens, options, clock))
            print(rows[-1], file=sys.stderr, flush=True)
        for tokens in sizes if options.layout == "rows" else ():
            rows.append(linear_row(kernels, tokens, options, clock))
            print(rows[-1], file=sys.stderr, flush=True)
    emit("expert_kernel", rows, monitor, as_json=options.json)


if __name__ == "__main__":
    main()
