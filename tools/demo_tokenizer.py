"""The demo model's tokenizer: byte-level BPE with a ChatML-like chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_corpus import BEGIN, END, STOP, Record, renderings

SPECIAL = (STOP, BEGIN, END)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') | trim"
    " + '<|im_end|>' + '\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)


def train_tokenizer(
    domains: dict[str, list[Record]], vocab_size: int, seed: int, chars_per_domain: int = 1_200_000
) -> Tokenizer:
    """Train on about the same number of characters of every domain.

    Chinese gets the same share although a character holds more there: about 1,500 of its
    characters become tokens of their own, every other one falls back to bytes.
    """
    samples: list[str] = []
    for records in domains.values():
        used = 0
        for text in renderings(records, seed):
            samples.append(text)
            used += len(text)
            if used >= chars_per_domain:
                break
    random.Random(seed).shuffle(samples)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(samples, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": STOP,
        "additional_special_tokens": [BEGIN, END],
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
