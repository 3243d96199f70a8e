"""Where settings come from: defaults < YAML file < COTERIE_* environment < flags, with origins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from app.model_entries import is_taken_over
from app.settings import Settings, key_paths, setting_keys
from core.errors import SettingsError
from deployments.ray_environment import KEYS_VARIABLE, MAX_BODY_VARIABLE

ENV_PREFIX = "COTERIE_"
NOT_SETTINGS = frozenset(
    {"COTERIE_API_KEY", "COTERIE_CACHE", "COTERIE_DATA", KEYS_VARIABLE, MAX_BODY_VARIABLE}
)
"""Variables of the same prefix that are no settings: the key that commands send, the cache folder,
the folder of texts that some tests read, the keys that requests need, and what a cluster's proxies
are told before there are any settings."""


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and the place it was set in, such as "coterie.yaml:4" or "--port"."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with the origin of every key; "default" where nobody set it."""

    settings: Settings
    origins: Mapping[str, str]


def load_settings(
    config: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Sourced],
    placeholder_model: str | None = None,
    also: Sequence[tuple[str, str]] = (),
) -> LoadedSettings:
    """Merges the sources, later ones winning. Raises SettingsError naming path and origin.

    The model is the one setting without a default; `placeholder_model` may stand in for it.
    `also` are (name, folder or hub id) of models to be served beside all others.
    """
    chosen: dict[str, Sourced] = {}
    if placeholder_model is not None:
        chosen["model"] = Sourced(placeholder_model, "default")
    for layer in (read_yaml(config) if config else {}, read_environment(environ), flags):
        for path in [path for path in layer if setting_keys().is_list(path)]:
            # A whole list replaces what lower layers say of it.
            chosen = {key: one for key, one in chosen.items() if not key.startswith(f"{path}.")}
        leaves = dict(_entries_opened(layer))
        setting_keys().refuse_unknown({path: sourced.origin for path, sourced in leaves.items()})
        chosen.update(leaves)
    for number, (name, model) in enumerate(also, len(_entry_numbers(chosen, "models"))):
        chosen[f"models.{number}.name"] = Sourced(name, "--also")
        chosen[f"models.{number}.model"] = Sourced(model, "--also")
    try:
        settings = Settings.model_validate(_nested(chosen))
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error, chosen))) from error
    origins = {path: _origin(path, chosen) for path in key_paths(settings)}
    return LoadedSettings(settings, origins)


def _entries_opened(layer: Mapping[str, Sourced]) -> Iterator[tuple[str, Sourced]]:
    """A layer's settings, with one for each leaf of lists that were given as a whole."""
    for path, sourced in layer.items():
        if setting_keys().is_list(path) and isinstance(sourced.value, list):
            for leaf, value in setting_keys().leaves(sourced.value, f"{path}."):
                yield leaf, Sourced(value, sourced.origin)
        else:
            yield path, sourced


def _origin(path: str, chosen: Mapping[str, Sourced]) -> str:
    """Where a value was set; of one that an entry takes from the first model, that one's key."""
    if path in chosen:
        return chosen[path].origin
    if path.startswith("models."):
        above = path.split(".", 2)[2]
        if is_taken_over(above) and above in chosen:
            return f"{above}, {chosen[above].origin}"
    return "default"


def _entry_numbers(paths: Iterable[str], section: str) -> list[int]:
    """The entries that some path lies in. Raises SettingsError where one is left out."""
    found: dict[int, str] = {}
    for path in paths:
        if path.startswith(f"{section}."):
            found.setdefault(int(path.removeprefix(f"{section}.").partition(".")[0]), path)
    for expected, number in enumerate(sorted(found)):
        if number != expected:
            raise SettingsError(
                f'"{found[number]}" is set, but nothing of {section}.{expected}: entries are '
                "numbered from 0 without gaps"
            )
    return sorted(found)


def _nested(chosen: Mapping[str, Sourced]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, sourced in chosen.items():
        *sections, name = path.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = sourced.value
    for section in setting_keys().lists:
        numbers = _entry_numbers(chosen, section)
        if numbers:
            nested[section] = [nested[section][str(number)] for number in numbers]
    return nested


def read_yaml(path: Path) -> dict[str, Sourced]:
    """Dotted paths of a YAML file, each with its line. Raises SettingsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot read the config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"the config file {path} is not UTF-8: {error}") from error
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise SettingsError(f"{path}: expected a mapping of settings, found {text[:40]!r}")
        found: dict[str, Sourced] = {}
        for key, value, line in _leaves(loader, root, ""):
            if key in found:
                raise SettingsError(
                    f'"{key}" is set twice: {found[key].origin} and {path.name}:{line}'
                )
            found[key] = Sourced(value, f"{path.name}:{line}")
        return found
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    finally:
        loader.dispose()


def _leaves(
    loader: yaml.SafeLoader, node: yaml.MappingNode | yaml.SequenceNode, prefix: str
) -> Iterator[tuple[str, Any, int]]:
    keys = setting_keys()
    for name, place, value_node in _items(loader, node):
        path = f"{prefix}{name}"
        if (isinstance(value_node, yaml.MappingNode) and path not in keys) or (
            isinstance(value_node, yaml.SequenceNode) and keys.is_list(path)
        ):
            yield from _leaves(loader, value_node, f"{path}.")
            continue
        value = loader.construct_object(value_node, deep=True)
        if value is None and keys.is_section(path) and not keys.is_entry(path):
            continue
        yield path, value, place.start_mark.line + 1


def _items(
    loader: yaml.SafeLoader, node: yaml.MappingNode | yaml.SequenceNode
) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """(name or number, the node that tells the line, the value's node)."""
    if isinstance(node, yaml.SequenceNode):
        for number, value_node in enumerate(node.value):
            yield str(number), value_node, value_node
        return
    for key_node, value_node in node.value:
        yield str(loader.construct_object(key_node, deep=True)), key_node, value_node


def read_environment(environ: Mapping[str, str]) -> dict[str, Sourced]:
    """Settings among environment variables: COTERIE_ENGINE__DTYPE sets engine.dtype."""
    found = {}
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS:
            path = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            found[path] = Sourced(parse_text(text), name)
    return found


def parse_text(text: str) -> Any:
    """A value given as text. "null" is None, [..] and {..} are YAML; pydantic does the rest."""
    stripped = text.strip()
    if stripped == "null":
        return None
    if stripped[:1] in ("[", "{"):
        try:
            return yaml.safe_load(stripped)
        except yaml.YAMLError as error:
            raise SettingsError(f"expected YAML in {text!r}: {error}") from error
    return text


def environment_name(path: str) -> str:
    """The environment variable that sets a dotted path."""
    return ENV_PREFIX + path.upper().replace(".", "__")


def _explain(error: ValidationError, chosen: Mapping[str, Sourced]) -> Iterator[str]:
    keys = setting_keys()
    items = error.errors(include_url=False)
    for item in items:
        # Unions and containers append to the location; the setting is its longest known prefix.
        parts = [str(part) for part in item["loc"]]
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        path = next((p for p in prefixes if p in keys or keys.is_section(p)), ".".join(parts))
        if path in keys and path not in chosen and item["type"] != "missing" and len(items) > 1:
            continue  # an entry has it from the first model, where it is told
        if item["type"] == "missing":
            yield (
                f"{path} is not set: give it on the command line, as {environment_name(path)}, "
                f'or as "{path}:" in the config file'
            )
            continue
        message = item["msg"].removeprefix("Value error, ")
        says = keys.is_section(path) or ", found " in message
        found = "" if says else f", found {item['input']!r}"
        origin = f" (from {chosen[path].origin})" if path in chosen else ""
        yield f"{path}: {message}{found}{origin}"
