"""All settings, composed from the rooms; strict about keys and about what contradicts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache, reduce
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from app.model_entries import ModelEntry, as_group, with_inherited
from app.setting_keys import SettingKeys
from core.config_model import ConfigModel
from core.errors import SettingsError
from core.objectives import ObjectiveSettings
from deployments.dispatch_rules import DispatchRule, DispatchRules
from deployments.dispatch_settings import DispatchSettings
from deployments.domain_settings import DomainSettings
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
    dispatch: DispatchSettings = DispatchSettings()
    """How a request finds its replica where a model has several ([dispatch.md](dispatch.md))."""
    domains: DomainSettings = DomainSettings()
    """How a request is labelled with what it is about ([domains.md](domains.md))."""
    models: tuple[ModelEntry, ...] = ()
    """Further models beside the first, and further groups of replicas of a model
    ([models.md](models.md))."""
    rules: tuple[DispatchRule, ...] = ()
    """What requests of a domain are bound to: a group of replicas, or a model."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        setting_keys().refuse_unknown({path: "" for path, _ in setting_keys().leaves(data)})
        return with_inherited(data)

    @model_validator(mode="after")
    def _parts_agree(self) -> Settings:
        for number, entry in enumerate(self.entries()):
            where = f"models.{number - 1}: " if number else ""
            try:
                check_sizes(self.serving, entry.engine.max_sequences, entry.engine.context_tokens)
            except SettingsError as error:
                raise SettingsError(f"{where}{error}") from error
        self.dispatch_rules()
        return self

    def entries(self) -> tuple[ModelEntry, ...]:
        """All models and groups, the first as an entry like the others; each names its model.

        Raises SettingsError where two contradict.
        """
        first = ModelEntry(
            name=self.model_name(),
            model=self.model,
            group=self.serving.group,
            replicas=self.serving.replicas,
            min_replicas=self.serving.min_replicas,
            tool_parser=self.serving.tool_parser,
            reasoning_parser=self.serving.reasoning_parser,
            pool=self.pool,
            engine=self.engine,
        )
        found = {(first.name, first.group): first}
        models = {first.name: first}
        for number, entry in enumerate(self.models):
            where = f"models.{number}"
            if entry.name in models:
                entry = as_group(entry, models[entry.name], where)
            elif entry.model is None:
                raise SettingsError(
                    f"{where}.model is not set, and no earlier model is named {entry.name!r}: give "
                    "its folder or hub id"
                )
            if (entry.name, entry.group) in found:
                group = f" and the group {entry.group!r}" if entry.group else ""
                raise SettingsError(
                    f"{where}: the name {entry.name!r}{group} is taken; give it a group of its own "
                    "to serve the model with further replicas, or another name"
                )
            models.setdefault(entry.name, entry)
            found[entry.name, entry.group] = entry
        return tuple(found.values())

    def model_name(self) -> str:
        """The first model's name for clients: as set, else the folder's name, else the hub id."""
        if self.serving.model_name is not None:
            return self.serving.model_name
        path = Path(self.model)
        return path.resolve().name if path.is_dir() else self.model

    def serving_of(self, entry: ModelEntry) -> ServingSettings:
        """The HTTP side as one entry's replicas see it."""
        own = {
            "model_name": entry.name,
            "group": entry.group,
            "replicas": entry.replicas,
            "min_replicas": entry.min_replicas,
            "tool_parser": entry.tool_parser or self.serving.tool_parser,
            "reasoning_parser": entry.reasoning_parser or self.serving.reasoning_parser,
        }
        return self.serving.model_copy(update=own)

    def dispatch_rules(self, domains: Collection[str] | None = None) -> DispatchRules:
        """The rules over the models and groups there are. Raises SettingsError.

        `domains` are all that a text can have, where that is known.
        """
        groups: dict[str, list[str]] = {}
        for entry in self.entries():
            groups.setdefault(entry.name, []).append(entry.group)
        return DispatchRules(self.rules, groups, domains)


@cache
def setting_keys() -> SettingKeys:
    """Every key that can be set."""
    return SettingKeys(Settings)


def known_keys() -> Mapping[str, FieldInfo]:
    """Every key as a dotted path, with its field; N stands for the numbers of entries."""
    return setting_keys().fields


def value_at(settings: Settings, path: str) -> Any:
    """The value of one dotted key."""
    return reduce(_part, path.split("."), settings)


def _part(value: Any, name: str) -> Any:
    return value[int(name)] if isinstance(value, tuple) else getattr(value, name)


def key_paths(settings: Settings) -> Iterator[str]:
    """The dotted paths of all values that `settings` hold, entry by entry."""
    for entries, keys in groupby(known_keys(), _entries_above):
        if not entries:
            yield from keys
            continue
        names = [key.removeprefix(f"{entries}.N.") for key in keys]
        for number in range(len(value_at(settings, entries))):
            yield from (f"{entries}.{number}.{name}" for name in names)


def _entries_above(key: str) -> str:
    """The list of entries that a key with N lies in; "" for none."""
    entries, mark, _ = key.partition(".N.")
    return entries if mark else ""
