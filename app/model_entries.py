"""Settings of the models, and of the groups of replicas, beside the first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator, model_validator

from core.config_model import ConfigModel
from core.errors import SettingsError
from deployments.settings import ReasoningParser, ToolParser, refuse_replica_bounds
from engine.settings import EngineSettings
from expert_pool.settings import PoolSettings

INHERITED = ("pool", "engine")
"""Sections of an entry whose keys are those of the first model where an entry sets none."""
_OWN = frozenset({"hot_set"})
"""Keys that say something of one model's experts."""
_MOST_NAME_CHARS = 128
"""The name becomes a part of files' names."""


class ModelEntry(ConfigModel):
    """A further model, or a further group of replicas of a model named before."""

    name: str = Field(min_length=1)
    """Name of the model in requests; that of an earlier one makes this a group of its replicas."""
    model: str | None = Field(default=None, min_length=1)
    """Folder or hub id, as for the first model; left out: that of the earlier one of this name."""
    group: str = Field(default="", pattern=r"^[\w.-]{0,64}$")
    """Name of these replicas among those of the same model, for rules and metrics."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Replicas (at most, where min_replicas is below it)."""
    min_replicas: Annotated[int, Field(ge=0)] | None = None
    """Fewest replicas; below `replicas`, Serve scales between both; 0 lets an idle model unload."""
    tool_parser: ToolParser | None = None
    """How this model writes calls of tools; left out: as serving.tool_parser says."""
    reasoning_parser: ReasoningParser | None = None
    """How this model marks reasoning; left out: as serving.reasoning_parser says."""
    pool: PoolSettings = PoolSettings()
    """Where this model's experts lie; what is left out is as in the section pool."""
    engine: EngineSettings = EngineSettings()
    """How a rank runs this model; what is left out is as in the section engine."""

    @field_validator("name")
    @classmethod
    def _printable(cls, name: str) -> str:
        if len(name) > _MOST_NAME_CHARS or not name.isprintable() or name != name.strip():
            raise ValueError(
                f"expected at most {_MOST_NAME_CHARS} printable characters and no space around them"
            )
        return name

    @model_validator(mode="after")
    def _replica_bounds(self) -> ModelEntry:
        refuse_replica_bounds(self.replicas, self.min_replicas)
        return self


def is_taken_over(key: str) -> bool:
    """Whether an entry's key, such as "pool.policy", is as for the first model unless it is set."""
    section, _, name = key.partition(".")
    return section in INHERITED and name not in _OWN


def absolute_model(model: str) -> str:
    """A folder's whole path; a hub id as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def as_group(entry: ModelEntry, first: ModelEntry, where: str) -> ModelEntry:
    """A further group of replicas of the model that the entry `first` tells of.

    Raises SettingsError where it says something else of what is the model's, not the group's.
    """
    if entry.model is not None and absolute_model(entry.model) != absolute_model(str(first.model)):
        raise SettingsError(
            f"{where}.model: the model {entry.name!r} is {first.model!r} already, found "
            f"{entry.model!r}; groups of one model have one folder, other models need another name"
        )
    for name in ("tool_parser", "reasoning_parser"):
        own, others = getattr(entry, name), getattr(first, name)
        if own not in (None, others):
            raise SettingsError(
                f"{where}.{name}: expected {others or 'none'}, as for the other replicas of "
                f"{entry.name!r}, found {own}: all of them write alike"
            )
    limits = [one.engine.context_tokens for one in (first, entry)]
    if limits[0] != limits[1]:
        raise SettingsError(
            f"{where}.engine.context_tokens: expected {limits[0]}, as for the other replicas of "
            f"{entry.name!r}, found {limits[1]}: a request must fit whichever group it goes to"
        )
    return entry.model_copy(
        update={
            "model": first.model,
            "tool_parser": first.tool_parser,
            "reasoning_parser": first.reasoning_parser,
        }
    )


def with_inherited(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Raw settings whose entries of `models` name what they take from the first model."""
    entries = data.get("models")
    if not isinstance(entries, list | tuple):
        return dict(data)
    return {**data, "models": [_filled(entry, data) for entry in entries]}


def _filled(entry: Any, data: Mapping[Any, Any]) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    filled = dict(entry)
    for section in INHERITED:
        own = _raw(entry.get(section))
        if isinstance(own, Mapping):
            above = _raw(data.get(section))
            base = dict(above) if isinstance(above, Mapping) else {}
            kept = {key: value for key, value in base.items() if key not in _OWN}
            filled[section] = {**kept, **own}
    return filled


def _raw(section: Any) -> Any:
    """What was set of a section, as a mapping; None where nothing was."""
    if section is None:
        return {}
    return section.model_dump(exclude_unset=True) if isinstance(section, BaseModel) else section
