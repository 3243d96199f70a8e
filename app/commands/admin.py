"""`coterie admin requests`, `cancel` and `drain`: through Serve's handles, not the port."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from app.local_service import APPLICATION
from app.running_service import connected
from core.errors import CoterieError

ANSWER_S = 10.0
TABLE_WIDTH = 120
HEADINGS = ("tenant", "priority", "state", "age s", "prompt tokens")
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
        from deployments.application import GATEWAY, SUPERVISOR

        replicas = ask_all(app, SUPERVISOR, "requests")
        found = [request for replica in replicas for request in replica]
        tenants: dict[str, dict[str, int]] = {}
        for gateway in ask_all(app, GATEWAY, "tenants"):
            tenants |= gateway
    if as_json:
        print(json.dumps({"requests": found, "tenants": tenants}, indent=2))
        return
    request_id = Column("request", no_wrap=True, min_width=45)
    others = (Column(name, no_wrap=True) for name in HEADINGS)
    table = Table(request_id, *others, box=None, pad_edge=False)
    for one in found:
        cells = ("request_id", "tenant", "priority", "state", "age_s", "prompt_tokens")
        table.add_row(*(str(one[cell]) for cell in cells))
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, TABLE_WIDTH)  # never cut a cell: ids are to be copied
    console.print(table if found else "nothing waits or runs")
    for name, use in tenants.items():
        console.print(
            f"tenant {name or 'everybody'}: {use['requests']} requests and {use['tokens']} tokens "
            f"in the last minute, {use['at_once']} at once",
            markup=False,
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
        from deployments.application import SUPERVISOR

        ended = any(ask_all(app, SUPERVISOR, "cancel", request_id))
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
        from deployments.drain import drain as drain_all

        if not drain_all(app, limit_s):
            raise CoterieError(f"the application {app!r} could not be drained: it does not answer")
    print("drained: nothing runs, new requests are refused")


def ask_all(app: str, deployment: str, method: str, *arguments: Any) -> list[Any]:
    """The answer of every replica. Raises CoterieError where there is none in time."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from deployments.drain import driver_handle

    try:
        handle = driver_handle(deployment, app)
        return list(handle.broadcast(method, *arguments).results(timeout_s=ANSWER_S))
    except (RayError, RayServeException, TimeoutError, KeyError) as error:
        raise CoterieError(
            f"{deployment} of application {app!r} gave no answer: {error}"
        ) from error
