"""`coterie config show`: every setting with its value and where that came from."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from app.commands.options import settings_command
from app.settings import known_keys, value_at
from app.settings_sources import LoadedSettings


def _show(
    loaded: LoadedSettings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print every setting, its value, and where the value came from.

    Takes the same arguments as `coterie serve` and starts nothing.

    \b
      coterie config show ./demo_model --port 9000
      coterie config show --config coterie.yaml --json
      COTERIE_ENGINE__SEED=7 coterie config show
    """
    rows = {
        key: {"value": value_at(loaded.settings, key), "origin": loaded.origins[key]}
        for key in known_keys()
    }
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for key, row in rows.items():
        style = "dim" if row["origin"] == "default" else "bold"
        value = "unset" if row["value"] is None else str(row["value"])
        table.add_row(key, value, str(row["origin"]), style=style)
    Console(soft_wrap=True, highlight=False).print(table)


show = settings_command(_show, placeholder_model="(not set)")
