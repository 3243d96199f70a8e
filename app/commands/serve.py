"""`coterie serve`: checks, starts a local Ray, serves, and stops cleanly."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from app.build import served_rules
from app.commands.options import settings_command
from app.local_ray import local_ray, prepare_environment
from app.local_service import LocalService
from app.memory_page import describe
from app.model_entries import absolute_model
from app.plain_console import plain_console
from app.preflight import PreflightProcess
from app.running_service import recorded
from app.settings import Settings
from app.settings_sources import LoadedSettings
from core.errors import CoterieError
from deployments.access import Access
from deployments.domain_classifier import checked
from expert_pool.model_location import locate

READY_LIMIT_S = 120.0
"""After the replicas are up: the first real step is under way by then."""


def _serve(
    loaded: LoadedSettings,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a hub id that the local cache lacks.")
    ] = False,
) -> None:
    """Serve models at http://HOST:PORT/v1 through Ray Serve on this machine.

    MODEL is a folder of safetensors or a hub id. All checkpoints and their memory are checked
    before Ray starts. Ctrl-C lets running requests end, then stops everything.

    \b
      coterie serve ./demo_model
      coterie serve MODEL --expert-memory 8GiB --port 9000
      coterie serve ORG/NAME --download --expert-memory 50%
      coterie serve --config coterie.yaml --set engine.seed=7
      coterie serve ./demo_model --also coder=ORG/CODER
    """
    started = time.monotonic()
    console = plain_console()
    signal.signal(signal.SIGTERM, _interrupt)
    entries = loaded.settings.entries()
    # Before anything starts; groups of one model share its folder.
    folders = [locate(str(entry.model), download).resolve() for entry in entries]
    settings = _resolved(loaded.settings)
    served_rules(settings)
    _refuse_taken_port(settings)
    if not Access(settings.serving).needs_key and not _is_loopback(settings.serving.host):
        console.print(
            f"warning: no API keys are set, so whoever reaches {settings.serving.host} can use "
            "the model (see docs/operations.md)"
        )
    prepare_environment(settings.serving.max_body_bytes)
    with console.status(Text(f"checking {', '.join(map(str, dict.fromkeys(folders)))}")):
        check = PreflightProcess(settings, folders)
        import ray  # noqa: F401  # takes seconds, so beside the check

        plans = check.result()
    console.print(describe(plans))
    with console.status("starting Ray") as status, local_ray(logical_cpus(settings)) as running:
        # Ray put a handler of its own in place, which aborts.
        signal.signal(signal.SIGTERM, _interrupt)
        service = LocalService(settings, running.logs)
        status.update("starting the replicas")
        broken = service.deploy()
        try:
            service.await_ready(READY_LIMIT_S)
            status.stop()
            for why in broken:
                console.print(f"warning: {why}")
            console.print(f"ready after {time.monotonic() - started:.0f} s. Try:\n")
            name = service.ready_model() or settings.model_name()
            line = example(service.url, name, Access(settings.serving).needs_key)
            console.print(line, end="\n\n")
            with recorded(running.address, service.url):
                _watch(console, service)
            console.print("stopping: running requests may end, new ones are refused")
        finally:
            service.stop()
    console.print("stopped")


def _watch(console: Console, service: LocalService) -> None:
    console.print("Ctrl-C stops.")
    try:
        for change in service.changes():
            console.print(change)
    except KeyboardInterrupt:
        return


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _resolved(settings: Settings) -> Settings:
    """With absolute paths (replicas have another working directory) and a definite port."""
    serving = settings.serving
    if serving.port == 0:
        with socket.create_server((serving.host, 0)) as probe:
            serving = serving.model_copy(update={"port": probe.getsockname()[1]})
    models = tuple(
        entry.model_copy(
            update={"model": None if entry.model is None else absolute_model(entry.model)}
        )
        for entry in settings.models
    )
    paths = {
        name: str(Path(value).expanduser().resolve())
        for name in ("keys_file", "request_log")
        if (value := getattr(serving, name)) is not None
    }
    serving = serving.model_copy(update=paths)
    return settings.model_copy(
        update={
            "model": absolute_model(settings.model),
            "models": models,
            "serving": serving,
            "domains": checked(settings.domains),
        }
    )


def _refuse_taken_port(settings: Settings) -> None:
    host, port = settings.serving.host, settings.serving.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise CoterieError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port or --host."
        ) from error


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def logical_cpus(settings: Settings) -> int:
    """CPUs that Ray is told of: enough to place everything. Threads share the real ones."""
    serving = settings.serving
    replicas = sum(entry.replicas for entry in settings.entries())
    needed = replicas * (serving.rank_cpus + 0.5) + 0.1 * serving.gateways
    return max(os.cpu_count() or 1, math.ceil(needed) + 1)


def example(url: str, model: str, needs_key: bool = False) -> str:
    """A curl line that works; where a key is needed, with one in COTERIE_API_KEY."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a short story."}],
        "max_tokens": 60,
        "temperature": 0,
    }
    key = '  -H "Authorization: Bearer $COTERIE_API_KEY" \\\n' if needs_key else ""
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n{key}"
        f"  -d '{json.dumps(body)}'"
    )


serve = settings_command(_serve, several=True)
