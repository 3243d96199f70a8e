"""Command-line options that are settings: shared by `serve` and `config show`, made from fields."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Concatenate, get_type_hints

import typer

from app.settings import known_keys
from app.settings_sources import LoadedSettings, Sourced, load_settings, parse_text
from core.errors import SettingsError

FLAGS = {
    "--expert-memory": "pool.expert_memory",
    "--host-memory": "pool.host_memory",
    "--policy": "pool.policy",
    "--dtype": "engine.dtype",
    "--context-tokens": "engine.context_tokens",
    "--kv-memory": "engine.kv_memory",
    "--max-sequences": "engine.max_sequences",
    "--threads": "engine.threads",
    "--host": "serving.host",
    "--port": "serving.port",
    "--replicas": "serving.replicas",
}
"""Settings with a flag of their own; --set reaches all others."""


def settings_command(
    function: Callable[Concatenate[LoadedSettings, ...], None],
    placeholder_model: str | None = None,
    several: bool = False,
) -> Callable[..., None]:
    """A typer command that takes the shared options and calls `function` with the settings.

    Further parameters of `function` become options of its own. A `placeholder_model` stands in
    where nobody names one. `several`: the command is about all models, so it takes --also.
    """
    hints = get_type_hints(function, include_extras=True)
    own = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=parameter.default, annotation=hints[name])
        for name, parameter in list(Signature.from_callable(function).parameters.items())[1:]
    ]

    def command(**values: Any) -> None:
        rest = {parameter.name: values[parameter.name] for parameter in own}
        function(_load(values, placeholder_model), **rest)

    shared = _shared_parameters(several)
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__signature__ = Signature([*shared, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*shared, *own]}
    return command


def _shared_parameters(several: bool) -> list[Parameter]:
    model = typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id.")
    config = typer.Option("--config", metavar="FILE", help="YAML file of settings.")
    assign = typer.Option("--set", metavar="KEY=VALUE", help="Any setting: --set engine.seed=7")
    options: list[tuple[str, Any]] = [
        ("model", Annotated[str | None, model]),
        ("config", Annotated[Path | None, config]),
    ]
    for flag, path in FLAGS.items():
        described = (known_keys()[path].description or "").replace("\n", " ")
        option = typer.Option(flag, metavar="VALUE", help=described)
        options.append((_variable(flag), Annotated[str | None, option]))
    if several:
        text = "A further model, under that name; may be repeated (see docs/models.md)."
        also = typer.Option("--also", metavar="NAME=MODEL", help=text)
        options.append(("also", Annotated[list[str] | None, also]))
    options.append(("assignments", Annotated[list[str] | None, assign]))
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options
    ]


def _variable(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _load(values: Mapping[str, Any], placeholder_model: str | None) -> LoadedSettings:
    chosen: dict[str, Sourced] = {}
    for assignment in values["assignments"] or []:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise SettingsError(f"--set takes KEY=VALUE, found {assignment!r}")
        chosen[key.strip()] = Sourced(parse_text(text), "--set")
    for flag, path in FLAGS.items():
        text = values[_variable(flag)]
        if text is not None:
            chosen[path] = Sourced(parse_text(text), flag)
    if values["model"] is not None:
        chosen["model"] = Sourced(values["model"], "command line")
    also = [_named_model(text) for text in values.get("also") or []]
    return load_settings(values["config"], os.environ, chosen, placeholder_model, also)


def _named_model(text: str) -> tuple[str, str]:
    """(name, folder or hub id). Raises SettingsError."""
    name, _, model = text.partition("=")
    if not (name.strip() and model.strip()):
        raise SettingsError(f"--also takes NAME=MODEL, such as coder=./my_coder, found {text!r}")
    return name.strip(), model.strip()
