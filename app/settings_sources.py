"""Where settings come from: defaults < YAML file < COTERIE_* environment < flags, with origins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from app.settings import Settings, known_keys, refuse_unknown_keys, section_names
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
) -> LoadedSettings:
    """Merges the sources, later ones winning. Raises SettingsError naming path and origin.

    The model is the one setting without a default; `placeholder_model` may stand in for it.
    """
    chosen: dict[str, Sourced] = {}
    if placeholder_model is not None:
        chosen["model"] = Sourced(placeholder_model, "default")
    for layer in (read_yaml(config) if config else {}, read_environment(environ), flags):
        refuse_unknown_keys({path: sourced.origin for path, sourced in layer.items()})
        chosen.update(layer)
    origins = {path: chosen[path].origin if path in chosen else "default" for path in known_keys()}
    nested: dict[str, Any] = {}
    for path, sourced in chosen.items():
        *sections, name = path.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = sourced.value
    try:
        return LoadedSettings(Settings.model_validate(nested), origins)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error, origins))) from error


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
    loader: yaml.SafeLoader, node: yaml.MappingNode, prefix: str
) -> Iterator[tuple[str, Any, int]]:
    for key_node, value_node in node.value:
        path = f"{prefix}{loader.construct_object(key_node, deep=True)}"
        if isinstance(value_node, yaml.MappingNode) and path not in known_keys():
            yield from _leaves(loader, value_node, f"{path}.")
            continue
        value = loader.construct_object(value_node, deep=True)
        if value is None and path in section_names():
            continue
        yield path, value, key_node.start_mark.line + 1


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


def _explain(error: ValidationError, origins: Mapping[str, str]) -> Iterator[str]:
    for item in error.errors(include_url=False):
        # Unions and containers append to the location; the setting is its longest known prefix.
        parts = [str(part) for part in item["loc"]]
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        path = next((p for p in prefixes if p in origins or p in section_names()), ".".join(parts))
        if item["type"] == "missing":
            yield (
                f"{path} is not set: give it on the command line, as {environment_name(path)}, "
                f'or as "{path}:" in the config file'
            )
            continue
        message = item["msg"].removeprefix("Value error, ")
        says = path in section_names() or ", found " in message
        found = "" if says else f", found {item['input']!r}"
        origin = f" (from {origins[path]})" if path in origins else ""
        yield f"{path}: {message}{found}{origin}"
