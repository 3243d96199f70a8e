"""What a model's authors say of sampling; requests that name a field override it. No torch."""

from __future__ import annotations

from pathlib import Path

from core.json_file import read_json_object

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model_dir: Path) -> dict[str, float]:
    """Fields of SamplingParams that generation_config.json sets. Raises CheckpointError."""
    config = read_json_object(model_dir / "generation_config.json")
    found = {name: config[name] for name in _NAMES if config.get(name) is not None}
    # Some models say "greedy" by do_sample alone.
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
