"""`coterie doctor`: whether this machine can serve, before anything starts."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import typer

from app.commands.options import settings_command
from app.health_checks import findings
from app.plain_console import plain_console
from app.settings_sources import LoadedSettings

NO_MODEL = "(not set)"
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def _doctor(
    loaded: LoadedSettings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check environment, versions, memory, disk and port. Starts nothing, reads little.

    With MODEL it also compares memory with the budgets and reads up to 256 MiB of the checkpoint.
    The exit code is 1 where something would keep the service from working.

    \b
      coterie doctor
      coterie doctor MODEL --expert-memory 8GiB
      coterie doctor ./demo_model --json
    """
    settings = loaded.settings
    found = []
    console = plain_console()
    for finding in findings(None if settings.model == NO_MODEL else settings, settings):
        found.append(finding)
        if not as_json:
            console.print(finding.state, style=_STYLES[finding.state], end="")
            console.print(f"{' ' * (8 - len(finding.state))}{finding.name}: {finding.found}")
            if finding.advice:
                console.print(f"        {finding.advice}")
    works = all(finding.state != "error" for finding in found)
    if as_json:
        print(json.dumps({"works": works, "checks": msgspec.to_builtins(found)}, indent=2))
    if not works:
        raise typer.Exit(1)


doctor = settings_command(_doctor, placeholder_model=NO_MODEL, several=True)
