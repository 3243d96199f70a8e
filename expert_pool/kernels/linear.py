"""The backbone's own linear layers in the native kernels, for few rows: bf16 on a CPU.

With few rows a linear layer is a pass over its weights, which torch reads at a fraction of the
memory's speed. Modules keep their parameters; only what `forward` calls is another.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from expert_pool.kernels.library import NativeKernels
from expert_pool.kernels.row_table import RowTable


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The layers that could be computed natively."""
    return [
        module
        for module in model.modules()
        # Not its subclasses: they may do anything.
        if type(module) is torch.nn.Linear and module.weight.numel() and _can_compute(module)
    ]


def _can_compute(module: torch.nn.Linear) -> bool:
    return all(
        values.dtype == torch.bfloat16 and values.device.type == "cpu" and values.is_contiguous()
        for values in (module.weight, module.bias)
        if values is not None
    )


def use_native_linears(model: torch.nn.Module, kernels: NativeKernels, table: RowTable) -> None:
    """Has `linear_layers(model)` computed natively for as many rows as `table` says."""
    for module in linear_layers(model):
        forward = functools.partial(native_linear, kernels, table, module)
        object.__setattr__(module, "forward", forward)


def use_torch_linears(model: torch.nn.Module) -> None:
    """Takes `use_native_linears` back."""
    for module in model.modules():
        own: Any = module.__dict__.get("forward")
        if isinstance(own, functools.partial) and own.func is native_linear:
            object.__delattr__(module, "forward")


def native_linear(
    kernels: NativeKernels, table: RowTable, module: torch.nn.Linear, rows: torch.Tensor
) -> torch.Tensor:
    """What `module(rows)` is, within rounding."""
    count = rows.numel() // max(1, rows.shape[-1])
    if (
        not count
        or not table.is_native(count, 1)
        or rows.dtype != torch.bfloat16
        or rows.device.type != "cpu"
        or rows.shape[-1] != module.in_features  # torch says what is wrong
        or not _can_compute(module)  # parameters may have been exchanged or moved
        or _wants_gradients(rows, module)
    ):
        return functional.linear(rows, module.weight, module.bias)
    return kernels.linear(rows, module.weight, module.bias)


def _wants_gradients(rows: torch.Tensor, module: torch.nn.Linear) -> bool:
    return torch.is_grad_enabled() and (
        rows.requires_grad
        or module.weight.requires_grad
        or (module.bias is not None and module.bias.requires_grad)
    )
