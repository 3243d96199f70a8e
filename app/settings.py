"""All settings, composed from the rooms; strict about keys and about what contradicts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache, reduce
from typing import Any

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from core.config_model import ConfigModel
from core.errors import SettingsError
from core.objectives import ObjectiveSettings
from deployments.settings import ServingSettings, check_sizes
from engine.settings import EngineSettings
from expert_pool.settings import PoolSettings


class Settings(ConfigModel):
    """What one Coterie application serves, and how."""

    model: str = Field(min_length=1)
    """Folder of a Hugging Face checkpoint, or a hub id whose files the local cache holds."""
    pool: PoolSettings = PoolSettings()
    """Where experts lie: the budget of slots and how they are read."""
    engine: EngineSettings = EngineSettings()
    """How one rank runs the model."""
    serving: ServingSettings = ServingSettings()
    """The HTTP side: addresses, replicas, limits."""
    objectives: ObjectiveSettings = ObjectiveSettings()
    """What a user should feel; every policy that trades latency reads these."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            refuse_unknown_keys(dict.fromkeys(leaf_paths(data), ""))
        return data

    @model_validator(mode="after")
    def _sizes_agree(self) -> Settings:
        check_sizes(self.serving, self.engine.max_sequences, self.engine.context_tokens)
        return self


@cache
def known_keys() -> Mapping[str, FieldInfo]:
    """Every key that can be set, as a dotted path, with its field."""
    return dict(_fields(Settings, ""))


@cache
def section_names() -> frozenset[str]:
    """Dotted paths that hold further keys."""
    return frozenset(path.rpartition(".")[0] for path in known_keys() if "." in path)


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def value_at(settings: Settings, path: str) -> Any:
    """The value of one dotted key."""
    return reduce(getattr, path.split("."), settings)


def leaf_paths(data: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of everything in nested mappings; a known key is never looked into."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in known_keys():
            yield from leaf_paths(value, f"{path}.")
        elif not isinstance(value, BaseModel):
            yield path


def refuse_unknown_keys(origins: Mapping[str, str]) -> None:
    """Raises SettingsError naming each path in `origins` that is no key, and the nearest one.

    `origins` maps a path to the place it was set in ("" where that is not known).
    """
    problems = [
        _unknown(path) + (f" (from {origin})" if origin else "")
        for path, origin in origins.items()
        if path not in known_keys()
    ]
    if problems:
        raise SettingsError("\n".join(problems))


def _unknown(path: str) -> str:
    if path in section_names():
        return f'"{path}" is a section: expected keys below it, such as {_some_keys(path)}'
    section, _, name = path.rpartition(".")
    elsewhere = [key for key in known_keys() if key.rpartition(".")[2] == name]
    if elsewhere:
        return f'misplaced setting "{path}": it belongs at {_either(elsewhere)}'
    near, likeness = max(((key, _likeness(path, key)) for key in known_keys()), key=lambda x: x[1])
    if likeness >= 0.6:
        return f'unknown setting "{path}": the nearest valid key is "{near}"'
    known = section if section in section_names() else ""
    where = f'section "{known}"' if known else "settings"
    return f'unknown setting "{path}": {where} has {_some_keys(known)}'


def _likeness(path: str, key: str) -> float:
    section, _, name = path.rpartition(".")
    key_section, _, key_name = key.rpartition(".")
    alike = difflib.SequenceMatcher(None, name, key_name).ratio()
    # Of two equally like names, the one in the section that was meant.
    return alike + 0.1 * (section == key_section) if alike >= 0.5 else 0.0


def _either(keys: list[str]) -> str:
    return " or ".join(f'"{key}"' for key in keys)


def _some_keys(section: str) -> str:
    prefix = f"{section}." if section else ""
    heads = dict.fromkeys(
        key.removeprefix(prefix).split(".")[0] for key in known_keys() if key.startswith(prefix)
    )
    return ", ".join(heads)
