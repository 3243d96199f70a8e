"""The demo model's architecture and its export in the standard hub layout."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tools.demo_corpus import END, STOP
from tools.demo_tokenizer import save_tokenizer

CONTEXT = 4096
"""Positions the exported model accepts, in tokens."""


def build_config(tokenizer: Tokenizer, small: bool = False) -> Qwen3MoeConfig:
    """9.3 million parameters; ``small`` is a much smaller one for tests."""
    return Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32 if small else 192,
        intermediate_size=64 if small else 256,
        num_hidden_layers=2 if small else 6,
        num_attention_heads=2 if small else 6,
        num_key_value_heads=1 if small else 2,
        head_dim=16 if small else 32,
        moe_intermediate_size=16 if small else 64,
        num_experts=8 if small else 32,
        num_experts_per_tok=2 if small else 4,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(STOP),
    )


def build_model(config: Qwen3MoeConfig, seed: int) -> Qwen3MoeForCausalLM:
    """A new fp32 model; what each block adds to the stream starts at zero."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() < 2:
                p.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj")):
                p.zero_()
            elif "embed_tokens" in name or "lm_head" in name:
                p.normal_(std=0.05 if "embed" in name else 0.02)
            else:
                p.normal_(std=0.5 * p.shape[-1] ** -0.5)
    return model


def _use_hub_names(path: Path) -> None:
    """Add the key names that published Qwen3-MoE configurations have."""
    config = json.loads(path.read_text())
    config["num_experts"] = config["num_local_experts"]
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def export(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, out: Path) -> int:
    """Write model, tokenizer and generation settings in bf16; returns the bytes written.

    The files are made in a folder beside ``out`` and moved in one by one, so that a reader
    never sees half a file. Other files in ``out`` (a model card) stay.
    """
    out.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".export-", dir=out.parent))
    try:
        copy = Qwen3MoeForCausalLM(model.config)
        copy.load_state_dict(model.state_dict())
        copy.to(torch.bfloat16).save_pretrained(made)
        stops = [tokenizer.token_to_id(END), tokenizer.token_to_id(STOP)]
        settings = {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.9,
            "repetition_penalty": 1.05,
            "eos_token_id": stops,
            "pad_token_id": stops[1],
        }
        (made / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        save_tokenizer(tokenizer, made, CONTEXT)
        _use_hub_names(made / "config.json")
        total = 0
        for path in sorted(made.iterdir()):
            path.chmod(0o644)
            total += path.stat().st_size
            os.replace(path, out / path.name)
        return total
    finally:
        shutil.rmtree(made, ignore_errors=True)
