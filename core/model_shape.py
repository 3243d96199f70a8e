"""The shape of a MoE model in numbers, and the byte formulas that everyone uses.

Engine reserves memory by these formulas; accounting prints them. No torch here.
"""

from __future__ import annotations

import msgspec

from core.errors import BudgetError

SLOT_ALIGN_BYTES = 4096
"""Slots start at page boundaries, so that a direct read can land in place."""
PARAM_ALIGN_BYTES = 64
"""Parameters inside a slot start at cache-line boundaries."""


def align_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


def experts_scratch_bytes(
    *,
    hidden_size: int,
    up_width: int,
    intermediate_size: int,
    dtype_bytes: int,
    weighted_bytes: int,
) -> int:
    """Bytes of intermediate results while one (token, expert) pair passes an MoE layer.

    Input row and output row (hidden), up projection, gating and its temporaries (four widths),
    then the weighted row and its place in [T, k, H] in the promoted dtype, and pair numbers.
    """
    values = 2 * hidden_size + up_width + 4 * intermediate_size
    return values * dtype_bytes + 2 * hidden_size * weighted_bytes + 32


class MoeLayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """One MoE layer: how many experts, how many a token uses, how large each is."""

    ordinal: int
    """0, 1, ... over the MoE layers alone."""
    decoder_layer: int
    """Position among all decoder layers (dense first layers are counted)."""
    num_experts: int
    top_k: int
    expert_params: int
    expert_bytes: int
    """Bytes of one expert's parameters, without alignment."""
    slot_bytes: int
    """Bytes of a slot that holds one such expert, alignment included."""


class KvLayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """What attention keeps for one token in one layer."""

    decoder_layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int | None = None
    """Sliding window, None for full attention."""
    shares_layer: int | None = None
    """Layer whose keys and values this one reuses (nothing of its own is stored)."""

    @property
    def values_per_token(self) -> int:
        """Numbers that one token leaves in this layer's pages; 0 where another layer's are used."""
        if self.shares_layer is not None:
            return 0
        return self.kv_heads * (self.key_dim + self.value_dim)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model in numbers."""

    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_limit_tokens: int
    dtype_bytes: int
    """Bytes of one backbone value (2 for bf16)."""
    total_params: int
    backbone_bytes: int
    moe_layers: tuple[MoeLayerShape, ...]
    kv_layers: tuple[KvLayerShape, ...]

    def kv_block_bytes(self, block_tokens: int) -> int:
        """Bytes of one KV block over all layers."""
        values = sum(layer.values_per_token for layer in self.kv_layers)
        return values * block_tokens * self.dtype_bytes

    def kv_blocks(
        self, kv_memory: int, block_tokens: int, max_sequences: int, context_tokens: int
    ) -> int:
        """Blocks that `kv_memory` bytes hold, at most what all sequences at full context use.

        Raises BudgetError where it holds none.
        """
        block_bytes = self.kv_block_bytes(block_tokens)
        useful = max_sequences * -(-context_tokens // block_tokens)
        if block_bytes == 0:
            return useful
        if kv_memory < block_bytes:
            raise BudgetError(
                f"one KV block of {block_tokens} tokens needs {block_bytes} bytes, "
                f"engine.kv_memory has {kv_memory} bytes; raise it"
            )
        return min(useful, kv_memory // block_bytes)

    @property
    def all_experts_bytes(self) -> int:
        """Bytes of slots that hold every expert."""
        return sum(layer.num_experts * layer.slot_bytes for layer in self.moe_layers)

    @property
    def min_slots_bytes(self) -> int:
        """The least that an expert pool works with: top_k slots in every MoE layer."""
        return sum(layer.top_k * layer.slot_bytes for layer in self.moe_layers)

    @property
    def expert_params(self) -> int:
        """Parameters of all experts of all layers."""
        return sum(layer.num_experts * layer.expert_params for layer in self.moe_layers)

    @property
    def token_activation_ratio(self) -> float:
        """Parameters that one token uses / all parameters."""
        unused = sum((x.num_experts - x.top_k) * x.expert_params for x in self.moe_layers)
        return (self.total_params - unused) / self.total_params

    @property
    def token_expert_activation_ratio(self) -> float:
        """The same on the basis of expert parameters alone."""
        used = sum(x.top_k * x.expert_params for x in self.moe_layers)
        return used / self.expert_params if self.moe_layers else 0.0
