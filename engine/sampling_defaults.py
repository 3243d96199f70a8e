"""What a model's authors say of sampling; requests that name a field override it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.errors import CheckpointError, RequestError
from core.json_file import read_json_object
from core.request import SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model_dir: Path) -> dict[str, float]:
    """Fields of SamplingParams that generation_config.json sets.

    Raises CheckpointError for values that no request could use: every request that leaves the
    field out would fail by them.
    """
    path = model_dir / "generation_config.json"
    config = read_json_object(path)
    found = {name: config[name] for name in _NAMES if config.get(name) is not None}
    for name, value in found.items():
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"{name} must be a number, found {value!r}.", name)
            if name == "top_k":
                found[name] = value = max(0, value)  # -1 is another word for "all"
            fields: dict[str, Any] = {name: value}
            SamplingParams(max_tokens=1, **fields)
        except RequestError as error:
            raise CheckpointError(f"{path}: {error} Mend it, or remove the entry.") from error
    # Some models say "greedy" by do_sample alone.
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found
