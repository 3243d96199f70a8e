"""A folder with the small files that serving reads: a byte-level tokenizer, a template, defaults.

Ids 0-255 are the bytes, so tests can force any byte sequence; a few merges make longer tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.token_pieces import byte_alphabet

SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
MERGES = ("D E", "DE F", "t h", "th e", "Ġ the", "l l", "o w")
TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- raise_exception('tools are not for this model') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
{%- if shout is defined -%}{{ shout.upper() }}{%- endif -%}"""


def vocabulary() -> dict[str, int]:
    tokens = dict(byte_alphabet())
    for merge in MERGES:
        tokens[merge.replace(" ", "")] = len(tokens)
    return tokens


def make_tokenizer(marks: tuple[str, ...] = ()) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocabulary(), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL + marks])
    return tokenizer


def make_folder(folder: Path, template: str | None = TEMPLATE, marks: tuple[str, ...] = ()) -> Path:
    """`marks` are special tokens besides the model's own; their ids follow those."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(marks).save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {"eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 7}))
    return folder
