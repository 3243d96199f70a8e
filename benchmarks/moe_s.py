"""The checkpoint "moe-s": an OLMoE-like model with random weights and uneven expert use.

2.55 GB in bf16, 421 MB active a token. Routers get row norms drawn per expert (lognormal, 0.5)
and eight times their usual size, so that some experts are popular as in trained models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN = 1024
LAYERS = 12
EXPERTS = 64
TOP_K = 8
INTERMEDIATE = 512
VOCAB = 8192
HEADS = 16
_STD = 0.02
_LAYERS_A_FILE = 3


def make_moe_s(folder: Path) -> Path:
    """Writes the checkpoint into `folder` unless it is there already; returns `folder`."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for first in range(0, LAYERS, _LAYERS_A_FILE):
        name = f"model-{first // _LAYERS_A_FILE + 1:05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(first, first + _LAYERS_A_FILE):
            tensors |= _layer(layer, generator)
        if first == 0:
            tensors["model.embed_tokens.weight"] = _normal((VOCAB, HIDDEN), generator)
            tensors["lm_head.weight"] = _normal((VOCAB, HIDDEN), generator)
            tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "config.json").write_text(json.dumps(_config(), indent=2))
    # Last: its presence says that all else was written.
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "pad_token_id": 1,
        "bos_token_id": None,
    }


def _layer(layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{layer}"
    tensors = {
        f"{prefix}.{norm}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
        )
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"{prefix}.self_attn.{name}.weight"] = _normal((HIDDEN, HIDDEN), generator)
    norms = torch.exp(0.5 * torch.randn((EXPERTS, 1), generator=generator))
    router = torch.randn((EXPERTS, HIDDEN), generator=generator) * _STD * 8 * norms
    tensors[f"{prefix}.mlp.gate.weight"] = router.bfloat16()
    for expert in range(EXPERTS):
        for name, shape in (
            ("gate_proj", (INTERMEDIATE, HIDDEN)),
            ("up_proj", (INTERMEDIATE, HIDDEN)),
            ("down_proj", (HIDDEN, INTERMEDIATE)),
        ):
            key = f"{prefix}.mlp.experts.{expert}.{name}.weight"
            tensors[key] = _normal(shape, generator)
    return tensors


def _normal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * _STD).bfloat16()


if __name__ == "__main__":
    print(make_moe_s(Path(sys.argv[1])))
