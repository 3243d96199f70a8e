"""The memory of the pool: slots, each as large as one expert, shared by layers of equal shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from core.config_model import format_bytes
from core.errors import BudgetError
from core.model_shape import SLOT_ALIGN_BYTES
from expert_pool.host_memory import available_bytes

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import LayerSpec, ParamSpec


def share_out(layers: Sequence[LayerSpec], budget_bytes: int) -> list[int]:
    """Slots of each layer under a budget: equal numbers, the remainder to the first layers.

    Every layer gets at least its top_k slots and at most one for each expert; what a small layer
    cannot use goes to the others. Raises BudgetError, with need and have in bytes, where the
    budget is below top_k slots in every layer.
    """
    quotas = [min(layer.top_k, layer.num_experts) for layer in layers]
    need = sum(quota * layer.slot_bytes for quota, layer in zip(quotas, layers, strict=True))
    if budget_bytes < need:
        raise BudgetError(
            f"expert memory: need at least {need} bytes ({format_bytes(need)}: top_k experts in "
            f"each of {len(layers)} MoE layers), have {budget_bytes} bytes "
            f"({format_bytes(budget_bytes)}); raise expert_memory to that or more"
        )
    left = budget_bytes - need
    while True:
        # Fill from the lowest up, so that quotas stay equal where layers do.
        growable = [
            at
            for at, layer in enumerate(layers)
            if quotas[at] < layer.num_experts and layer.slot_bytes <= left
        ]
        if not growable:
            return quotas
        lowest = min(quotas[at] for at in growable)
        for at in growable:
            if quotas[at] == lowest and layers[at].slot_bytes <= left:
                quotas[at] += 1
                left -= layers[at].slot_bytes


class SlotArena:
    """One block of bytes, cut into page-aligned slots of one shape.

    `views[name]` is that parameter over all slots: `[capacity, *shape]`, strided by the slot
    size, so that grouped matrix products run on slots where they lie.
    """

    def __init__(
        self, params: Sequence[ParamSpec], slot_bytes: int, capacity: int, device: torch.device
    ) -> None:
        self.slot_bytes = slot_bytes
        self.capacity = capacity
        need = capacity * slot_bytes
        self._bytes = _allocate(need, device)
        self.views: dict[str, torch.Tensor] = {}
        for param in params:
            dtype = getattr(torch, param.dtype)
            typed = self._bytes.view(dtype)
            strides = torch.empty(param.shape, device="meta").stride()
            self.views[param.name] = typed.as_strided(
                (capacity, *param.shape),
                (slot_bytes // dtype.itemsize, *strides),
                typed.storage_offset() + param.slot_offset // dtype.itemsize,
            )

    def slot(self, number: int) -> torch.Tensor:
        """The bytes of one slot, `[slot_bytes]` uint8."""
        return self._bytes[number * self.slot_bytes : (number + 1) * self.slot_bytes]


def _allocate(need: int, device: torch.device) -> torch.Tensor:
    """`need` bytes from a page boundary on. Raises BudgetError where there are fewer."""
    if device.type == "cpu":
        # Linux would promise more than there is and kill us at the first long prompt.
        have = available_bytes()
        if need > have:
            raise BudgetError(
                f"expert memory: need {need} bytes ({format_bytes(need)}), have {have} bytes "
                f"({format_bytes(have)}) available on this machine; lower expert_memory"
            )
        block = torch.empty(need + SLOT_ALIGN_BYTES, dtype=torch.uint8)
        start = -block.data_ptr() % SLOT_ALIGN_BYTES
        return block[start : start + need]
    try:
        return torch.empty(need, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise BudgetError(
            f"expert memory: need {need} bytes ({format_bytes(need)}), have {free} bytes free "
            f"on {device}; lower expert_memory"
        ) from error
