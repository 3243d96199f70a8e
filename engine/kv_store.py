"""The memory behind KV blocks: one tensor of pages a layer, and the scratch that gathers use."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.attention_layout import AttentionLayer
from engine.step_layout import StepLayout

_HALF = (torch.bfloat16, torch.float16)


def widens(dtype: torch.dtype, device: torch.device, queries: int) -> bool:
    """Whether attention is computed in fp32 on a copy of 16-bit keys and values.

    On CPUs a single query over 16-bit keys costs two to four times as much as over fp32 ones,
    copy included; longer ones only gain from 16 bits where the CPU multiplies them natively.
    """
    if device.type != "cpu" or dtype not in _HALF:
        return False
    return queries == 1 or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


class KvStore:
    """The pages of all layers, and the scratch that gathers go through."""

    def __init__(
        self,
        layers: tuple[AttentionLayer, ...],
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch_bytes: int,
    ) -> None:
        self.block_tokens = block_tokens
        self._local = threading.local()
        own = {x.layer_idx: x for x in layers if x.shares_layer is None}
        # Written, not only mapped: the memory is there from the start, and no stale NaN exists.
        self.pages = {
            idx: torch.empty(
                (num_blocks, block_tokens, x.values_per_token), dtype=dtype, device=device
            ).zero_()
            for idx, x in own.items()
        }
        widest = max((x.values_per_token for x in own.values()), default=0)
        wide = widens(dtype, device, 1)
        self.gather_bytes = max(
            scratch_bytes * dtype.itemsize // (dtype.itemsize + 4 * wide),
            block_tokens * widest * dtype.itemsize,
        )
        """What one call may gather: the scratch budget, less the room for an fp32 copy of it."""
        values = self.gather_bytes // dtype.itemsize
        self._scratch = torch.empty(values, dtype=dtype, device=device).zero_()
        self._wide = torch.empty(values if wide else 0, dtype=torch.float32, device=device)
        self._wide.zero_()

    @property
    def step(self) -> StepLayout | None:
        """The step under way in this thread: a paused pass of another thread keeps its own."""
        return getattr(self._local, "step", None)

    @step.setter
    def step(self, step: StepLayout | None) -> None:
        self._local.step = step

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Zeroes blocks whose content may not be finite: masked keys still meet 0 * NaN."""
        for pages in self.pages.values():
            pages[block_ids] = 0

    def scratch(
        self, num_blocks: int, pages: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Room for `num_blocks` gathered blocks of `pages`, and for their copy in another dtype.

        Every call is given the same memory: its content is valid until the next gather.
        """
        shape = (num_blocks, *pages.shape[1:])
        values = shape[0] * shape[1] * shape[2]
        raw = self._scratch[:values].view(shape)
        return raw, None if dtype == pages.dtype else self._wide[:values].view(shape)


class PagedCache(Cache):
    """Writes new keys and values to pages and hands them back for prompts that need no others."""

    def __init__(self, store: KvStore, layers: tuple[AttentionLayer, ...]) -> None:
        super().__init__(layers=[])
        self._store = store
        self._pages = {idx: pages.flatten(0, 1) for idx, pages in store.pages.items()}
        self._latent = {x.layer_idx for x in layers if x.latent}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states and value_states [1, heads, T, dim] of the step; returns what was written."""
        step = self._store.step
        if step is None:
            raise RuntimeError("PagedCache.update outside of a step")
        pages = self._pages[layer_idx]
        if layer_idx in self._latent:
            latent = torch.cat([key_states, value_states], dim=-1)
            pages.index_copy_(0, step.slots, latent[0, 0])
            return latent, latent
        keys = key_states[0].transpose(0, 1).flatten(1)
        values = value_states[0].transpose(0, 1).flatten(1)
        pages.index_copy_(0, step.slots, torch.cat([keys, values], dim=1))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """[T] offsets that turn 0 .. T-1 into positions, for models that count from the cache."""
        step = self._store.step
        if step is None:
            return 0
        return step.position_ids[0] - torch.arange(step.num_tokens, device=step.device)
