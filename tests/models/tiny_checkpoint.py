"""Weights and a tokenizer for tiny checkpoints that behave like real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ROUTER_PARTS = ("gate.weight", "router.weight", "router.layer.weight", "router.proj.weight")


def fill_weights(model: Any, seed: int) -> None:
    """Gives every weight a size at which hidden states, routing and logits have a real spread.

    Matrices are drawn at 1/sqrt(fan in), routers wider so that the choice of experts is decided,
    vectors (norms, biases, sinks, state parameters) get noise on top of their initial value.
    """
    generator = torch.Generator().manual_seed(seed + 1)

    def noise(tensor: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator) * std

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.add_(noise(parameter, 0.1))
            elif "embed" in name and parameter.dim() == 2:
                parameter.copy_(noise(parameter, 0.5))
            elif name.endswith(_ROUTER_PARTS):
                parameter.copy_(noise(parameter, 2.0 * parameter.shape[-1] ** -0.5))
            elif name.endswith("_bias"):
                parameter.copy_(noise(parameter, 0.1))
            else:
                fan_in = min(parameter.shape[-2:]) if parameter.dim() == 3 else parameter.shape[-1]
                parameter.copy_(noise(parameter, fan_in**-0.5))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias", "bias")):
                buffer.add_(noise(buffer, 0.1).to(buffer.dtype))


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of VOCAB_SIZE ids at most, with special tokens and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
