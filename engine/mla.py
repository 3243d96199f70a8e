"""Multi-head latent attention on the cached latents themselves.

Stock code expands every cached latent to keys and values in each step. Since both are linear in
the latent, the key half of `kv_b_proj` can be applied to the queries instead, and the value half
to the attention's output (DeepSeek-V2, section 2.1.2).
"""

from __future__ import annotations

from typing import Any

import torch


def _halves(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """([H, nope, rank], [H, v, rank]): the key and the value half of `kv_b_proj`."""
    weight = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)
    nope: int = module.qk_nope_head_dim
    return weight[:, :nope], weight[:, nope:]


def absorb_keys(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries [1, H, T, nope + rope] as queries on latents [1, H, T, rank + rope]."""
    keys, _ = _halves(module)
    nope: int = module.qk_nope_head_dim
    absorbed = query[0, :, :, :nope] @ keys
    return torch.cat([absorbed, query[0, :, :, nope:]], dim=-1).unsqueeze(0)


def expand_values(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Attended latents [T, H, rank] as values [T, H, v]."""
    _, values = _halves(module)
    return (latents.transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1)
