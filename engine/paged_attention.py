"""Attention over a flattened ragged batch whose keys and values lie in pages.

`paged_attention`, registered under ATTENTION_NAME, gathers what each query sees: one call for
each length bucket of decoding sequences, one for each prompt part. What a call gathers is bounded
by the scratch budget; longer spans are cut along the keys and merged by their log-sum-exp (Dao et
al. 2022, section 3.1).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from engine.attention_layout import AttentionLayer
from engine.kv_store import KvStore, widens
from engine.mla import absorb_keys, expand_values
from engine.step_layout import Call, Span

ATTENTION_NAME = "coterie_paged"
"""Not known to transformers' AttentionMaskInterface, so that models skip mask creation."""

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the log-sum-exp of its scores: ([B, H, Q, Dv], [B, H, Q] fp32).

    query [B, H, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, Dv], additive mask broadcastable to
    [B, H, Q, K]; heads are grouped as H / Hkv neighbours.
    """
    if _is_fused(query, value.shape[-1], softcap):
        out, lse = _flash_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
        return out, lse
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return scores.softmax(-1).nan_to_num(0.0).to(value.dtype) @ value, lse


def _is_fused(query: torch.Tensor, value_dim: int, softcap: float | None) -> bool:
    """Whether `attend` makes no scores of its own."""
    return query.device.type == "cpu" and query.shape[-1] == value_dim and softcap is None


class LayerAttention:
    """One layer's attention over the pages it owns or shares."""

    def __init__(self, layer: AttentionLayer, store: KvStore) -> None:
        self._layer = layer
        self._store = store
        source = layer.layer_idx if layer.shares_layer is None else layer.shares_layer
        self._pages = store.pages[source]
        self._geometry = (layer.kv_heads, layer.key_dim, layer.value_dim, layer.latent)
        self._block_bytes = self._pages[0].numel() * self._pages.element_size()
        if layer.latent:
            # Stock would expand every latent here; the pages keep them as they are.
            module: Any = layer.module
            module.expand_kv = lambda latent, _: (latent, latent)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [1, H, T, D] and the step's new key and value; returns [1, T, H, Dv]."""
        step = self._store.step
        if step is None:
            raise RuntimeError("paged attention outside of a step")
        if self._layer.latent:
            query = absorb_keys(self._layer.module, query)
        spans = step.spans_for(self._layer.window)
        heads, width = query.shape[1], value.shape[-1]
        out = None
        for span in spans:
            result, lse = self._span(span, query, key, value, scaling, softcap)
            if sinks is not None:
                # A sink is one more score in the denominator only.
                share = torch.sigmoid(lse.reshape(span.count, heads, -1) - sinks[:, None])
                result = result * share[..., None].to(result.dtype)
            flat = result.transpose(1, 2).reshape(-1, heads, width)
            if len(spans) == 1:
                out = flat
                break
            if out is None:
                out = flat.new_empty((step.num_tokens, heads, width))
            out[span.rows] = flat
        if out is None:
            raise RuntimeError("a step without tokens")
        if self._layer.latent:
            out = expand_values(self._layer.module, out[..., : self._layer.key_dim])
        return out.contiguous().unsqueeze(0)

    def _span(
        self,
        span: Span,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[count, H, queries, Dv] and the log-sum-exp of one span, in that order of values."""
        if span.fresh_causal and self._scores_fit(span, query, softcap):
            own = slice(None), slice(None), span.rows
            dtype = self._dtype(span)
            fresh = query[own].to(dtype), key[own].to(dtype), value[own].to(dtype)
            out, lse = attend(fresh[0], fresh[1], fresh[2], None, True, scaling, softcap)
            return out.to(query.dtype), lse
        if span.queries > 1:
            return self._gathered(span, query[:, :, span.rows], scaling, softcap)
        # [B, H, D] -> [B, Hkv, H / Hkv, D]: neighbours that share keys become queries.
        heads, kv_heads = query.shape[1], key.shape[1]
        rows = query[0].transpose(0, 1)
        if span.count != query.shape[2]:
            rows = rows[span.rows]
        packed = rows.reshape(span.count, kv_heads, heads // kv_heads, -1)
        out, lse = self._gathered(span, packed, scaling, softcap)
        return out.reshape(span.count, heads, 1, -1), lse

    def _scores_fit(self, span: Span, query: torch.Tensor, softcap: float | None) -> bool:
        """Whether a prompt may attend in one call: what makes scores keeps to the scratch."""
        value_dim = query.shape[-1] if self._layer.latent else self._layer.value_dim
        if _is_fused(query, value_dim, softcap):
            return True
        return 3 * 4 * query.shape[1] * span.queries**2 <= self._store.gather_bytes

    def _gathered(
        self, span: Span, query: torch.Tensor, scaling: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One call where the span fits the scratch budget, else cut by sequence, then by keys."""
        if (call := span.calls.get(self._geometry)) is not None:
            return self._run(call, query, scaling, softcap)
        budget = self._store.gather_bytes
        blocks = span.blocks
        if span.queries > 1:
            # A prompt part's mask counts too; what the gather may take is what it leaves.
            key_bytes = span.queries * self._pages.element_size()
            value_dim = query.shape[-1] if self._layer.latent else self._layer.value_dim
            if not _is_fused(query, value_dim, softcap):
                # Scores, their exponentials and their mask in float32, for each head.
                key_bytes += 3 * 4 * query.shape[1] * span.queries
            mask_bytes = key_bytes * self._store.block_tokens
            blocks = max(1, min(blocks, budget // (self._block_bytes + mask_bytes)))
        blocks = max(1, min(blocks, budget // self._block_bytes))
        lines = max(1, budget // (span.blocks * self._block_bytes))
        if lines >= span.count and blocks == span.blocks:
            call = self._prepare(span.table, query, self._mask(span, 0, blocks))
            span.calls[self._geometry] = call
            return self._run(call, query, scaling, softcap)
        table = span.table.view(span.count, span.blocks)
        parts = []
        for line in range(0, span.count, lines):
            merged = None
            few = slice(line, line + lines)
            for first in range(0, span.blocks, blocks):
                some = table[few, first : first + blocks]
                mask = self._mask(span, first, some.shape[1])[few]
                call = self._prepare(some.reshape(-1), query[few], mask)
                out, lse = self._run(call, query[few], scaling, softcap)
                # A row that sees none of these keys adds nothing.
                lse = lse.masked_fill(torch.isneginf(mask.amax(-1)), -torch.inf)
                merged = (out.float(), lse) if merged is None else _merge(merged, (out, lse))
            if merged is not None:
                parts.append(merged)
        out = torch.cat([part[0] for part in parts]).to(query.dtype)
        return out, torch.cat([part[1] for part in parts])

    def _dtype(self, span: Span) -> torch.dtype:
        wide = widens(self._pages.dtype, self._pages.device, span.queries)
        return torch.float32 if wide else self._pages.dtype

    def _mask(self, span: Span, first_block: int, blocks: int) -> torch.Tensor:
        size = self._store.block_tokens
        seen = span.visible(self._layer.window, first_block * size, blocks * size)
        mask = torch.zeros(seen.shape, dtype=self._dtype(span))
        mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)
        return mask.to(self._pages.device).unsqueeze(1)

    def _prepare(self, table: torch.Tensor, query: torch.Tensor, mask: torch.Tensor) -> Call:
        """The views of scratch that keys and values will be seen through; nothing is copied."""
        raw, wide = self._store.scratch(len(table), self._pages, mask.dtype)
        gathered = raw if wide is None else wide
        count, width = query.shape[0], self._pages.shape[-1]
        flat = gathered.view(count, -1, width)
        if self._layer.latent:
            key = value = flat.unsqueeze(1)
        else:
            heads, split = self._layer.kv_heads, self._layer.kv_heads * self._layer.key_dim
            key = flat[..., :split].view(*flat.shape[:2], heads, -1).transpose(1, 2)
            value = flat[..., split:].view(*flat.shape[:2], heads, -1).transpose(1, 2)
        mask = mask.expand(-1, -1, query.shape[2], -1)
        return Call(table, raw, wide, key, value, mask)

    def _run(
        self, call: Call, query: torch.Tensor, scaling: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.index_select(self._pages, 0, call.table, out=call.raw)
        if call.wide is None:
            return attend(query, call.key, call.value, call.mask, False, scaling, softcap)
        call.wide.copy_(call.raw)
        out, lse = attend(query.float(), call.key, call.value, call.mask, False, scaling, softcap)
        return out.to(query.dtype), lse


def _merge(
    one: tuple[torch.Tensor, torch.Tensor], two: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, in fp32."""
    total = torch.logaddexp(one[1], two[1])
    weights = [torch.exp(part[1] - total).nan_to_num(0.0)[..., None] for part in (one, two)]
    return one[0] * weights[0] + two[0].float() * weights[1], total


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; the layer's pages hang on the module."""
    layer: LayerAttention = module._coterie_attention  # type: ignore[assignment]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return layer(query, key, value, scaling, softcap, s_aux), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
