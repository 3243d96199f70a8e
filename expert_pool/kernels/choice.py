"""Who computes each MoE layer of a model, torch or the native kernels: settled when a pool is
attached, and from then on a matter of a call's rows alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from core.errors import SettingsError
from expert_pool.kernels.build import BuildError
from expert_pool.kernels.layer_kernel import LayerKernel, activation_of, unsupported
from expert_pool.kernels.library import NativeKernels, open_kernels
from expert_pool.kernels.linear import linear_layers, use_native_linears, use_torch_linears
from expert_pool.kernels.measure import linear_table, row_table
from expert_pool.kernels.row_table import ALWAYS, RowTable
from expert_pool.kernels.shared_object import BEST

if TYPE_CHECKING:
    from expert_pool.pool import ExpertPool

_ATTRIBUTE = "_coterie_kernel"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerChoice:
    """A layer's kernel, and for which calls it is used."""

    kernel: LayerKernel
    table: RowTable

    def kernel_for(self, hidden: torch.Tensor, rows: int, experts: int) -> LayerKernel | None:
        """The kernel for `rows` (token, expert) pairs over `experts` distinct ones, or torch."""
        if hidden.dtype == torch.bfloat16 and self.table.is_native(rows, experts):
            return self.kernel
        return None


def choice_of(module: Any) -> LayerChoice | None:
    """What was settled for an experts module; None: torch computes all of its calls."""
    return getattr(module, _ATTRIBUTE, None)


def kernel_for(module: Any, hidden: torch.Tensor, rows: int, experts: int) -> LayerKernel | None:
    """What computes a call of `module`; None: torch. The same wherever experts lie."""
    choice = choice_of(module)
    return None if choice is None else choice.kernel_for(hidden, rows, experts)


def choose_kernels(pool: ExpertPool, model: torch.nn.Module) -> None:
    """Settles it for all layers of `model`, as `pool.kernel` says.

    Raises SettingsError where kernels are asked for that cannot be had.
    """
    kernels = _open(pool)
    _choose_for_linears(pool, model, kernels)
    for layer in pool.index.layers:
        module: Any = model.get_submodule(layer.module_name)
        choice = None
        if kernels is not None:
            reason = unsupported(module, layer.params)
            if reason is None:
                activation = activation_of(module) or 0
                arena = pool.residency.arena(layer.ordinal)
                table = ALWAYS
                if pool.settings.kernel == "auto":
                    table = row_table(kernels, layer, module, activation)
                choice = LayerChoice(LayerKernel(kernels, arena, layer.params, activation), table)
            else:
                _log.info("%s is computed by torch: %s", layer.module_name, reason)
        object.__setattr__(module, _ATTRIBUTE, choice)


def _choose_for_linears(
    pool: ExpertPool, model: torch.nn.Module, kernels: NativeKernels | None
) -> None:
    use_torch_linears(model)  # of an earlier pool
    if kernels is None:
        return
    layers = linear_layers(model)
    if layers:
        auto = pool.settings.kernel == "auto"
        use_native_linears(model, kernels, linear_table(kernels, layers) if auto else ALWAYS)


def _open(pool: ExpertPool) -> NativeKernels | None:
    wanted = pool.settings.kernel
    if wanted == "torch" or pool.device.type != "cpu":
        return None
    try:
        return open_kernels(BEST if wanted == "auto" else wanted)
    except BuildError as error:
        if wanted == "auto":
            _log.info("experts are computed by torch: %s", error)
            return None
        raise SettingsError(f"pool.kernel is {wanted!r}: {error}") from error
