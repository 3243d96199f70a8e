"""`coterie status`: asks a running service for /health, /ready and /v1/models."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from app.running_service import running_services
from core.errors import CoterieError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0
KEY_VARIABLE = "COTERIE_API_KEY"
# A proxy from the environment is for the outside; the service is ours.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def status(
    url: Annotated[
        str | None,
        typer.Argument(
            help="Where the service listens. Left out: the one that you run on this machine, "
            f"else {DEFAULT_URL}."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Ask a running service how it is. The exit code is 0 only when it is ready.

    Where keys are configured, COTERIE_API_KEY is needed to see the models.

    \b
      coterie status
      coterie status http://10.0.0.5:8000 --json
    """
    found = read_status(url or _local_url())
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{found['url']}: {'ready' if found['ready'] else 'not ready'}")
        none = f"a key is needed to list them: set {KEY_VARIABLE}"
        none = none if found["needs_key"] else "none listed"
        print(f"models: {', '.join(found['models']) or none}")
        for line in _lines(found["details"]):
            print(line)
    if not found["ready"]:
        raise typer.Exit(1)


def _lines(details: dict[str, Any], indent: str = "") -> Iterator[str]:
    """What /ready says, each model and each group of replicas on a line of its own."""
    for name, value in details.items():
        if not isinstance(value, dict):
            if name != "ready":
                yield f"{indent}{name}: {value}"
            continue
        for part, says in value.items():
            if not isinstance(says, dict):
                continue  # whoever answers there is no service of ours
            state = "ready" if says.get("ready") else "not ready"
            why = f", {says['reason']}" if "reason" in says else ""
            of = f"{says.get('ready_replicas')} of {says.get('replicas')} replicas ready"
            yield f"{indent}{name[:-1]} {part or 'without a name'}: {state}, {of}{why}"
            yield from _lines({"groups": says.get("groups", {})}, f"{indent}  ")


def _local_url() -> str:
    services = running_services()
    return services[0].url if len(services) == 1 else DEFAULT_URL


def read_status(url: str) -> dict[str, Any]:
    """{url, alive, ready, models, needs_key, details}; `details` is what /ready says.

    Raises CoterieError.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if "://" not in base:
        base = f"http://{base}"
    alive, _ = get_json(f"{base}/health")
    ready, details = get_json(f"{base}/ready")
    code, models = get_json(f"{base}/v1/models")
    listed = models.get("data") if isinstance(models, dict) else None
    cards = listed if isinstance(listed, list) else []
    names = [card["id"] for card in cards if isinstance(card, dict) and "id" in card]
    return {
        "url": base,
        "alive": alive == 200,
        "ready": ready == 200,
        "models": [str(name) for name in names],
        "needs_key": code == 401,
        "details": details if isinstance(details, dict) else {},
    }


def get_json(url: str) -> tuple[int, Any]:
    """HTTP status and JSON body, None where the body is none. CoterieError: nobody answered."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        asked = urllib.request.Request(url, headers=headers)
        with _OPENER.open(asked, timeout=TIMEOUT_S) as response:
            code, body = response.status, response.read()
    except urllib.error.HTTPError as error:
        code, body = error.code, error.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CoterieError(
            f"no answer from {url}: {reason}. Start a service with coterie serve, or give the "
            "address of yours: coterie status URL"
        ) from error
    try:
        return code, json.loads(body)
    except ValueError:
        return code, None
