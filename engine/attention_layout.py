"""What each attention layer of a model keeps and sees: K/V geometry and the visible window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionMaskInterface

from core.errors import CheckpointError

PROBE_NAME = "coterie_probe"


@dataclass(frozen=True, slots=True)
class Window:
    """Which earlier positions a query sees: all, the last `tokens`, or its chunk of `tokens`."""

    kind: Literal["full", "sliding", "chunked"] = "full"
    tokens: int = 0

    def first_visible(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The earliest position that a query at each of `positions` attends to."""
        if self.kind == "sliding":
            return np.maximum(positions - self.tokens + 1, 0)
        if self.kind == "chunked":
            return positions // self.tokens * self.tokens
        return np.zeros_like(positions)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One decoder layer's attention."""

    module: torch.nn.Module
    layer_idx: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: Window
    latent: bool = False
    """MLA: one shared latent of key_dim (compressed) + value_dim (rotary) is kept."""
    shares_layer: int | None = None
    """Layer whose pages this one reads; it keeps none of its own."""

    @property
    def values_per_token(self) -> int:
        """Numbers that one token leaves in this layer's pages."""
        if self.shares_layer is not None:
            return 0
        return self.kv_heads * (self.key_dim + self.value_dim)


def read_layout(model: Any) -> tuple[AttentionLayer, ...]:
    """The attention layers of a causal language model, in order.

    Windows are asked from the model's own mask code, not guessed from config fields: families
    disagree on which field means what. Raises CheckpointError for a pattern that is not known.
    """
    layers = _decoder_layers(model)
    windows = _windows(model, layers)
    found: list[AttentionLayer] = []
    last_stored: dict[str, int] = {}
    for layer, window in zip(layers, windows, strict=True):
        module = _attention_module(layer)
        idx = int(module.layer_idx)
        if hasattr(module, "kv_lora_rank"):
            dims = (1, int(module.kv_lora_rank), int(module.qk_rope_head_dim))
            found.append(AttentionLayer(module, idx, *dims, window, latent=True))
            continue
        layer_type = str(getattr(module, "layer_type", ""))
        if getattr(module, "is_kv_shared_layer", False):
            source = next(x for x in found if x.layer_idx == last_stored[layer_type])
            dims = (source.kv_heads, source.key_dim, source.value_dim)
            found.append(AttentionLayer(module, idx, *dims, window, shares_layer=source.layer_idx))
            continue
        head_dim = int(module.head_dim)
        kv_heads = module.k_proj.out_features // head_dim
        value_dim = head_dim
        if getattr(module, "v_proj", None) is not None:
            value_dim = module.v_proj.out_features // kv_heads
        found.append(AttentionLayer(module, idx, kv_heads, head_dim, value_dim, window))
        last_stored[layer_type] = idx
    return tuple(found)


def _decoder_layers(model: Any) -> list[torch.nn.Module]:
    return list(model.model.layers[: model.config.num_hidden_layers])


def _attention_module(layer: torch.nn.Module) -> Any:
    found = [m for m in layer.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
    if len(found) != 1:
        raise CheckpointError(
            f"expected one attention module in {type(layer).__name__}, found {len(found)}; "
            "this family needs stock caches."
        )
    return found[0]


def _describe_mask(mask_function: Any, local_size: int | None = None, **_: Any) -> Window:
    """Stands in for mask creation: says which window the model asked for."""
    if local_size is None:
        return Window()

    def sees(query: int, key: int) -> bool:
        zero = torch.zeros((), dtype=torch.long)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    size = int(local_size)
    if sees(size, 1) and not sees(size, 0) and sees(2 * size - 1, size):
        # At query `size` a sliding window still sees 1 .. size; a new chunk sees only itself.
        return Window("sliding", size)
    if not sees(size, size - 1) and sees(2 * size - 1, size):
        return Window("chunked", size)
    if size == 1 and sees(1, 1) and not sees(1, 0):
        return Window("sliding", 1)
    raise CheckpointError(f"attention mask of local size {size} is neither sliding nor chunked.")


def _windows(model: Any, layers: list[torch.nn.Module]) -> list[Window]:
    """Runs the model with its decoder layers replaced by recorders of the mask they are given."""
    seen: list[Window] = []

    def record(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = kwargs.get("attention_mask")
        seen.append(mask if isinstance(mask, Window) else Window())
        return hidden_states

    AttentionMaskInterface.register(PROBE_NAME, _describe_mask)
    config = model.config
    previous = config._attn_implementation
    device = model.get_input_embeddings().weight.device
    try:
        config._attn_implementation = PROBE_NAME
        for layer in layers:
            layer.forward = record
        with torch.inference_mode():
            probe = torch.zeros((1, 1), dtype=torch.long, device=device)
            model.model(input_ids=probe, use_cache=False)
    finally:
        config._attn_implementation = previous
        for layer in layers:
            del layer.forward
    if len(seen) != len(layers):
        raise CheckpointError(
            f"expected a mask for each of {len(layers)} decoder layers, found {len(seen)}."
        )
    return seen
