"""Who computes each MoE layer of a model, torch or the native kernels: settled when a pool is
attached, and from then on a matter of a call's rows alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from core.errors import BudgetError, SettingsError
from expert_pool.kernels.activation import activation_of
from expert_pool.kernels.build import BuildError
from expert_pool.kernels.layer_kernel import LayerKernel, unsupported
from expert_pool.kernels.library import NativeKernels, open_kernels
from expert_pool.kernels.linear import linear_layers, use_native_linears, use_torch_linears
from expert_pool.kernels.measure import linear_table, row_table
from expert_pool.kernels.row_table import ALWAYS, RowTable
from expert_pool.kernels.shared_object import BEST

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import LayerSpec
    from expert_pool.pool import ExpertPool

_ATTRIBUTE = "_coterie_kernel"
_NO_MEMORY = (BudgetError, MemoryError, RuntimeError)
"""What a measurement ends with that finds none; torch's allocator raises the last."""
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
    reasons = {}
    for layer in pool.index.layers:
        module: Any = model.get_submodule(layer.module_name)
        choice: LayerChoice | None = None
        if kernels is not None:
            found = _layer_choice(pool, kernels, layer, module)
            if isinstance(found, LayerChoice):
                choice = found
            else:
                reasons[layer.module_name] = found
        object.__setattr__(module, _ATTRIBUTE, choice)
    for name, reason in reasons.items():
        _log.info("%s is computed by torch: %s", name, reason)
    wanted = pool.settings.kernel
    if wanted not in ("auto", "torch") and len(reasons) == len(pool.index.layers):
        # Not an error: a group of machines may share its settings.
        _log.warning(
            "pool.kernel is %r, but torch computes all experts: %s",
            wanted,
            next(iter(reasons.values()), ""),
        )


def _layer_choice(
    pool: ExpertPool, kernels: NativeKernels, layer: LayerSpec, module: Any
) -> LayerChoice | str:
    """A layer's kernel, or why it has none."""
    activation = activation_of(module)
    reason = unsupported(module, layer.params, activation)
    if reason is not None or activation is None:
        return str(reason)
    table = ALWAYS
    if pool.settings.kernel == "auto":
        try:
            table = row_table(kernels, layer, module, activation)
        except _NO_MEMORY as error:
            return f"it could not be measured: {error}"
    arena = pool.residency.arena(layer.ordinal)
    kernel = LayerKernel(kernels, arena, layer.params, activation, bool(module.is_transposed))
    return LayerChoice(kernel, table)


def _choose_for_linears(
    pool: ExpertPool, model: torch.nn.Module, kernels: NativeKernels | None
) -> None:
    use_torch_linears(model)  # of an earlier pool
    if kernels is None:
        return
    layers = linear_layers(model)
    if layers:
        auto = pool.settings.kernel == "auto"
        try:
            table = linear_table(kernels, layers) if auto else ALWAYS
        except _NO_MEMORY as error:
            _log.info("linear layers are computed by torch: not measured: %s", error)
            return
        use_native_linears(model, kernels, table)


def _open(pool: ExpertPool) -> NativeKernels | None:
    wanted = pool.settings.kernel
    if wanted != "torch" and pool.device.type != "cpu":
        if wanted != "auto":
            _log.warning(
                "pool.kernel is %r, which is of CPUs: experts are on %s", wanted, pool.device
            )
        return None
    if wanted == "torch":
        return None
    try:
        return open_kernels(BEST if wanted == "auto" else wanted)
    except BuildError as error:
        if wanted == "auto":
            _log.info("experts are computed by torch: %s", error)
            return None
        raise SettingsError(f"pool.kernel is {wanted!r}: {error}") from error
