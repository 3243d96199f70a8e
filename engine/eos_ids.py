"""The token ids that end a sequence, united from every file of a model that names some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_eos_ids(model_dir: Path) -> tuple[int, ...]:
    """Sorted ids from config.json, generation_config.json and the tokenizer's eos_token.

    Models disagree with themselves: a chat model's turn often ends with an id that only
    generation_config.json or the tokenizer names. Any of them ends a sequence.
    """
    config = _read_json(model_dir / "config.json")
    found: set[int] = set()
    for source in (
        config,
        config.get("text_config") or {},
        _read_json(model_dir / "generation_config.json"),
    ):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    token = _read_json(model_dir / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text:
        tokenizer = _read_json(model_dir / "tokenizer.json")
        for added in tokenizer.get("added_tokens", ()):
            if added["content"] == text:
                found.add(added["id"])
    return tuple(sorted(found))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
