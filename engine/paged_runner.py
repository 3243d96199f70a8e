"""Runs step plans on the backbone with all sequences flattened into one ragged batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from core.errors import BudgetError
from core.step import StepPlan
from engine.attention_layout import read_layout
from engine.kv_store import KvStore, PagedCache
from engine.paged_attention import ATTENTION_NAME, LayerAttention
from engine.step_layout import StepLayout, StepLayoutBuilder
from expert_pool.layer_major import layer_major


class PagedRunner:
    """Holds the KV pages of a model and runs one step at a time on them."""

    def __init__(
        self,
        model: Any,
        num_blocks: int,
        block_tokens: int,
        max_step_tokens: int,
        scratch_bytes: int,
        pass_tokens: int = 0,
    ) -> None:
        """Reserves pages and scratch at once. Raises BudgetError if the machine refuses."""
        self._model = model
        embedding = model.get_input_embeddings().weight
        layers = read_layout(model)
        try:
            self.store = KvStore(
                layers, num_blocks, block_tokens, embedding.dtype, embedding.device, scratch_bytes
            )
        except RuntimeError as error:
            values = sum(layer.values_per_token for layer in layers)
            need = num_blocks * block_tokens * values * embedding.element_size() + scratch_bytes
            raise BudgetError(
                f"KV pages and scratch need {need} bytes, which the device refused: {error}. "
                "Lower engine.kv_memory or engine.scratch_memory."
            ) from error
        self._cache = PagedCache(self.store, layers)
        self._builder = StepLayoutBuilder(max_step_tokens, block_tokens, embedding.device)
        # A pass may be paused while steps run: its numbers lie elsewhere.
        self._pass_builder = StepLayoutBuilder(pass_tokens, block_tokens, embedding.device)
        for layer in layers:
            layer.module._coterie_attention = LayerAttention(  # type: ignore[assignment]
                layer, self.store
            )
        model.set_attn_implementation(ATTENTION_NAME)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits [rows, V] of a step: for each part its scored rows, then the sampled one."""
        if plan.layer_major:
            with layer_major():
                return self._pass_through(self._pass_builder.build(plan))
        return self._pass_through(self._builder.build(plan))

    def _pass_through(self, step: StepLayout) -> torch.Tensor:
        self.store.step = step
        try:
            output = self._model(
                input_ids=step.input_ids,
                position_ids=step.position_ids,
                cache=self._cache,
                use_cache=True,
                logits_to_keep=step.logit_rows,
            )
        finally:
            self.store.step = None
        logits: torch.Tensor = output.logits[0]
        return logits

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Nothing to drop: a sequence's state is its blocks, which the batcher gives out."""

    def discard(self, block_ids: list[int]) -> None:
        """Clears the blocks of a failed sequence, whose content may not be finite."""
        if block_ids:
            self.store.clear_blocks(block_ids)
