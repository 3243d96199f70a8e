"""The 25 MoE families as tiny checkpoints: one row a family, none of them skipped.

Each row is small enough to run in milliseconds and odd enough to exercise what its family does
differently: dense first layers, shared experts, sliding windows, sinks, MLA, group-limited
routing, normalised and unnormalised top-k weights, scaling factors, biases, state layers.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.tiny_checkpoint import VOCAB_SIZE, fill_weights, write_tokenizer


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    name: str
    """The model_type of its config.json."""
    config: dict[str, Any]
    state: bool = False
    """Has layers with a recurrent or convolution state: stock caches only."""
    whole_prompt_only: bool = False
    """Its state is wrong after a second chunk of more than one token."""
    rope_threshold_tokens: int | None = None
    """Position beyond which its RoPE factors change."""
    shim: bool = False
    """Its experts class lies outside transformers' experts interface."""


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LINEAR_ATTENTION = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}

_ROWS: tuple[Family, ...] = (
    Family(
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 12},
    ),
    Family(
        "olmoe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "clip_qkv": 3.0,
            "num_key_value_heads": 4,
        },
    ),
    Family(
        "qwen2_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 8,
            "norm_topk_prob": False,
        },
    ),
    Family(
        "qwen3_moe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "head_dim": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
    Family("qwen3_next", {**_LINEAR_ATTENTION, "norm_topk_prob": True}, state=True),
    Family(
        "qwen3_5_moe_text",
        {
            **_LINEAR_ATTENTION,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        state=True,
    ),
    Family(
        "deepseek_v2",
        {**_MLA, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    Family(
        "deepseek_v3",
        {
            **_MLA,
            "q_lora_rank": 24,
            "norm_topk_prob": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    Family(
        "gpt_oss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "head_dim": 16,
            "sliding_window": 8,
            "intermediate_size": 48,
        },
    ),
    Family(
        "granitemoe",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        "phimoe",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [1.0, 1.5, 2.2, 3.1, 4.2, 5.5, 7.0, 9.0],
                "short_mscale": 1.1,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 32,
            },
            "max_position_embeddings": 256,
        },
        rope_threshold_tokens=32,
    ),
    Family(
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
        },
    ),
    Family(
        "ernie4_5_moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "use_bias": True,
        },
    ),
    Family(
        "dots1",
        {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    Family(
        "hunyuan_v1_moe",
        {
            "num_experts": 8,
            "moe_topk": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "max_position_embeddings": 32,
        },
        rope_threshold_tokens=32,
    ),
    Family(
        "jamba",
        {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        state=True,
        whole_prompt_only=True,
    ),
    Family(
        "lfm2_moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "routed_scaling_factor": 1.5,
        },
        state=True,
    ),
    Family(
        "minimax",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            # Linear layers first, as in the released models.
            "layer_types": [
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
            "block_size": 8,
            "full_attn_alpha_factor": 1.5,
            "linear_attn_alpha_factor": 1.2,
            "mlp_beta_factor": 0.8,
        },
        state=True,
    ),
    Family(
        "minimax_m2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rotary_dim": 16,
        },
    ),
    Family(
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "sliding_window": 8,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"],
            "head_dim": 16,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "chunk_size": 8,
            # Stock clamps its time step here when it runs many tokens, but not when it runs one:
            # it would not agree with itself.
            "time_step_min": 1e-7,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        state=True,
    ),
    Family(
        "afmoe",
        {
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "sliding_window": 8,
            "global_attn_every_n_layers": 2,
            "route_scale": 2.0,
            "mup_enabled": True,
        },
    ),
    Family(
        "flex_olmo",
        {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4},
    ),
    Family(
        "exaone_moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "sliding_window": 8,
            "sliding_window_pattern": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    Family(
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
        },
        shim=True,
    ),
)

FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}


def make_config(family: str, **changes: Any) -> Any:
    """The tiny config of a family with `changes`, as AutoConfig makes it."""
    values = {**_COMMON, **FAMILIES[family].config, **changes}
    if family == "nemotron_h":
        del values["num_hidden_layers"]
    return AutoConfig.for_model(family, **values)


def make_checkpoint(
    family: str,
    folder: Path,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 1,
    **changes: Any,
) -> Path:
    """Writes a tiny random checkpoint of `family` in its original hub layout; returns its folder.

    `dtype` is "float32", "bfloat16" or "float16"; `shards` is the least number of safetensors
    files; `changes` are fields of the config. A byte-level tokenizer with a chat template lies
    beside it.
    """
    names = [f"{key}={value}" for key, value in sorted(changes.items())]
    path = folder / "-".join([family, dtype, str(seed), str(shards), *names])
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(family, **changes), dtype=torch.float32)
    fill_weights(model, seed)
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    target = getattr(torch, dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not any(part in name for part in kept):
            tensor.data = tensor.data.to(target)
    model.config.dtype = target
    nbytes = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    model.save_pretrained(path, max_shard_size=nbytes if shards == 1 else nbytes // shards)
    write_tokenizer(path)
    return path


@functools.cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="coterie-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def cached_checkpoint(family: str, dtype: str = "float32", seed: int = 0, shards: int = 1) -> Path:
    """`make_checkpoint` in a folder of this process, made once. Callers must not change it."""
    folder = _made_once(family, dtype, seed, shards)
    # Checksums that an engine of an earlier test learned beside it are not part of it.
    shutil.rmtree(folder / ".coterie", ignore_errors=True)
    return folder


@functools.cache
def _made_once(family: str, dtype: str, seed: int, shards: int) -> Path:
    return make_checkpoint(family, _session_folder(), dtype, seed, shards)
