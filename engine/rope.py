"""RoPE factors fixed by the served context limit, never by who shares a batch.

Stock transformers picks the factors of longrope and dynamic RoPE from the largest position in the
batch, so one long neighbour would change everyone's answer.
"""

from __future__ import annotations

from typing import Any

import torch


def is_dynamic(rotary: torch.nn.Module) -> bool:
    """True where a rotary embedding's factors depend on the largest position it is given."""
    rope_type = getattr(rotary, "rope_type", None)
    kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


def stretch_factor(config: Any) -> float:
    """How many times its max_position_embeddings a model may serve: dynamic RoPE goes beyond it,
    by the factor that its configuration names.
    """
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if parameters.get("rope_type") == "dynamic":
        return max(1.0, float(parameters.get("factor") or 1.0))
    return 1.0


def fix_rope_factors(model: torch.nn.Module, context_tokens: int) -> list[str]:
    """Makes every dynamic rotary embedding of `model` behave as if position context_tokens - 1
    were always in the batch, and returns the names of those embeddings.

    The stock forward stays in charge of the arithmetic: it is shown one more position, and that
    position's row is dropped from what it returns.
    """
    fixed = [name for name, module in model.named_modules() if is_dynamic(module)]
    for name in fixed:
        rotary = model.get_submodule(name)
        rotary.forward = _with_last_position(rotary.forward, context_tokens - 1)
    return fixed


def _with_last_position(stock_forward: Any, last_position: int) -> Any:
    def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), last_position)
        found = stock_forward(x, torch.cat((position_ids, last), dim=-1), *args, **kwargs)
        if isinstance(found, tuple):
            return tuple(part[..., :-1, :] for part in found)
        return found[..., :-1, :]

    return forward
