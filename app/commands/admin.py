"""`coterie admin requests`, `cancel` and `drain`: through Serve's handles, not the port."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from app.local_service import APPLICATION
from app.plain_console import print_whole
from app.running_service import connected
from core.errors import CoterieError

ANSWER_S = 10.0
HEADINGS = ("request", "model", "tenant", "priority", "state", "age s", "prompt tokens")
Url = Annotated[str | None, typer.Option("--url", help="Which local service, if there are many.")]
Address = Annotated[str | None, typer.Option("--address", help="A Ray cluster's address instead.")]
App = Annotated[str, typer.Option("--app", help="Name of the Serve application.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def requests(
    url: Url = None, address: Address = None, app: App = APPLICATION, as_json: AsJson = False
) -> None:
    """List the requests that wait or run, and what limited tenants use. Shows no text.

    \b
      coterie admin requests
      coterie admin requests --json
    """
    with connected(url, address):
        from deployments.application import GATEWAY

        found = listed_requests(app)
        tenants: dict[str, dict[str, int]] = {}
        for gateway in ask_all(app, GATEWAY, "tenants"):
            tenants |= gateway
    if as_json:
        print(json.dumps({"requests": found, "tenants": tenants}, indent=2))
        return
    table = Table(*HEADINGS, box=None, pad_edge=False)
    for one in found:
        cells = ("request_id", "model", "tenant", "priority", "state", "age_s", "prompt_tokens")
        table.add_row(*(str(one[cell]) for cell in cells))
    if found:
        print_whole(table)
    else:
        print("nothing waits or runs")
    for name, use in tenants.items():
        print(
            f"tenant {name or 'everybody'}: {use['requests']} requests and {use['tokens']} tokens "
            f"in the last minute, {use['at_once']} at once"
        )


def cancel(
    request_id: Annotated[str, typer.Argument(help="The id of its answer, such as chatcmpl-...")],
    url: Url = None,
    address: Address = None,
    app: App = APPLICATION,
) -> None:
    """End one request: its client gets an error, its place is free.

    \b
      coterie admin cancel chatcmpl-0f3c...
    """
    with connected(url, address):
        answers = ask_supervisors(app, "cancel", request_id)
        ended = any(done for replicas in answers.values() for done in replicas)
    if not ended:
        raise CoterieError(f"no request {request_id} waits or runs (see coterie admin requests)")
    print(f"ended {request_id}")


def drain(
    limit_s: Annotated[
        float, typer.Option("--limit", help="Seconds after which what still runs is ended.")
    ] = 30.0,
    url: Url = None,
    address: Address = None,
    app: App = APPLICATION,
) -> None:
    """Let requests finish and refuse new ones with 503, as before an orderly stop.

    The service stays up and refuses until it is started anew.

    \b
      coterie admin drain
      coterie admin drain --limit 120
    """
    with connected(url, address):
        from deployments.running_application import drain as drain_all

        if not drain_all(app, limit_s):
            raise CoterieError(f"the application {app!r} could not be drained: it does not answer")
    print("drained: nothing runs, new requests are refused")


def listed_requests(app: str) -> list[dict[str, Any]]:
    """What waits or runs in the replicas of all models. Raises CoterieError."""
    from deployments.application import GATEWAY

    models = ask_all(app, GATEWAY, "deployments")[0]
    found = []
    for deployment, replicas in ask_supervisors(app, "requests").items():
        model, group = models.get(deployment, ("", ""))
        named = {"model": model, **({"group": group} if group else {})}
        found += [named | request for replica in replicas for request in replica]
    return found


def ask_all(app: str, deployment: str, method: str, *arguments: Any) -> list[Any]:
    """The answer of every replica. Raises CoterieError where there is none in time."""
    from deployments import running_application

    return running_application.ask_all(app, deployment, method, *arguments, limit_s=ANSWER_S)


def ask_supervisors(app: str, method: str, *arguments: Any) -> dict[str, list[Any]]:
    """The answers of all running replicas of all models, by deployment.

    One that gives none is told on stderr. Raises CoterieError where no deployment answers.
    """
    from deployments.running_application import supervisor_deployments

    answers: dict[str, list[Any]] = {}
    silent: list[CoterieError] = []
    for name in supervisor_deployments(app):
        try:
            answers[name] = ask_all(app, name, method, *arguments)
        except CoterieError as error:
            silent.append(error)
    if silent and not answers:
        raise silent[0]
    for why in silent:
        print(f"warning: {why}", file=sys.stderr)
    return answers
