"""`coterie admin keys`: make a key, hash one, or let a running service read its file again."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from app.commands.admin import Address, App, Url, ask_all
from app.local_service import APPLICATION
from app.running_service import connected
from core.errors import CoterieError


def keys(
    action: Annotated[
        Literal["new", "hash", "reload"], typer.Argument(help="new, hash or reload.")
    ],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose key, for `new`.")] = "default",
    url: Url = None,
    address: Address = None,
    app: App = APPLICATION,
) -> None:
    """Make API keys (new), write one as keys files hold it (hash), or reload the file of a service.

    \b
      coterie admin keys new --tenant acme      a random key, and its entry
      coterie admin keys hash < key.txt         the entry of a key you have
      coterie admin keys reload                 running gateways read their file
    """
    if action == "reload":
        _reload(url, address, app)
        return
    from deployments.api_keys import digest_text, new_key

    if action == "hash":
        typed = sys.stdin.isatty()
        key = (typer.prompt("key", hide_input=True) if typed else sys.stdin.readline()).strip()
        if not key:
            raise CoterieError("expected a key, found an empty line")
        print(digest_text(key))
        return
    key = new_key()
    print(f"key, shown this once: {key}\nin the keys file:\n")
    print(f"tenants:\n  {tenant}:\n    keys:\n      - {digest_text(key)}")


def _reload(url: str | None, address: str | None, app: str) -> None:
    with connected(url, address):
        from deployments.application import GATEWAY

        answers = ask_all(app, GATEWAY, "reload_keys")
    refused = [answer for answer in answers if isinstance(answer, str)]
    if refused:
        raise CoterieError(
            f"{len(refused)} of {len(answers)} gateways keep their old keys: {refused[0]}"
        )
    if not any(answers):
        print("no keys are configured: everybody may use the service")
    else:
        print(f"{len(answers)} gateways, {answers[0]} keys")
