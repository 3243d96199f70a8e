"""`coterie config show`: every setting with its value and where that came from."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer
import yaml
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from rich.table import Table

from app.commands.options import settings_command
from app.model_entries import INHERITED
from app.plain_console import print_whole
from app.settings import key_paths, setting_keys, value_at
from app.settings_sources import LoadedSettings
from core.config_model import exact_bytes, parse_bytes
from expert_pool.settings import parse_expert_memory, parse_host_memory

_READERS_OF_BYTES = (parse_bytes, parse_expert_memory, parse_host_memory)


def _show(
    loaded: LoadedSettings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print every setting, its value as YAML takes it, and where the value came from.

    Takes the same arguments as `coterie serve` and starts nothing. Of further models it prints
    what differs from the first; --json prints all.

    \b
      coterie config show ./demo_model --port 9000
      coterie config show --config coterie.yaml --json
      COTERIE_ENGINE__SEED=7 coterie config show
    """
    rows = {
        path: {"value": value_at(loaded.settings, path), "origin": loaded.origins[path]}
        for path in key_paths(loaded.settings)
    }
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for path, row in rows.items():
        general = setting_keys().general(path)
        section, is_default = general.rpartition(".")[0], row["origin"] == "default"
        # Line after line of what the first model's own lines say would hide what is set.
        if section.startswith("models.N.") and section.endswith(INHERITED) and is_default:
            continue
        value = written(setting_keys().fields[general], row["value"])
        table.add_row(path, value, str(row["origin"]), style="dim" if is_default else "bold")
    print_whole(table)


def written(field: FieldInfo, value: Any) -> str:
    """A value in the form that a YAML file takes."""
    takes_bytes = any(
        isinstance(part, BeforeValidator) and part.func in _READERS_OF_BYTES
        for part in field.metadata
    )
    if takes_bytes and isinstance(value, int):
        return exact_bytes(value)
    plain = to_jsonable_python(value)
    if isinstance(value, dict):
        plain = value  # JSON would make texts of its keys
    text = yaml.safe_dump(plain, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


show = settings_command(_show, placeholder_model="(not set)", several=True)
