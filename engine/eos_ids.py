"""The token ids that end a sequence, united from every file of a model that names some."""

from __future__ import annotations

from pathlib import Path

from core.errors import CheckpointError
from core.json_file import read_json_object


def read_eos_ids(model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """Sorted ids from config.json, generation_config.json and the tokenizer's eos_token.

    Models disagree with themselves: a chat model's turn often ends with an id that only
    generation_config.json or the tokenizer names. Any of them ends a sequence. Ids that the model
    cannot give (-1, or from `vocab_size` on) are left out. Raises CheckpointError.
    """
    config = read_json_object(model_dir / "config.json")
    found: set[int] = set()
    for source in (
        config,
        config.get("text_config") or {},
        read_json_object(model_dir / "generation_config.json"),
    ):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in ids):
            raise CheckpointError(
                f"Expected token ids as eos_token_id in config.json and generation_config.json of "
                f"{model_dir}, found {value!r}."
            )
        found.update(ids)
    token = read_json_object(model_dir / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if text:
        tokenizer = read_json_object(model_dir / "tokenizer.json")
        for added in tokenizer.get("added_tokens", ()):
            if added["content"] == text:
                found.add(added["id"])
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))
