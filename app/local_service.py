"""The application on a local Ray: deployed, awaited, watched, drained."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

from app.commands.status import get_json
from app.local_ray import hushed
from app.settings import Settings
from core.errors import CoterieError

APPLICATION = "coterie"
POLL_S = 0.1
WATCH_S = 2.0
LOG_LINES = 12


class LocalService:
    """One Serve application in the Ray that this process is connected to."""

    def __init__(self, settings: Settings, logs: Path) -> None:
        self._settings = settings
        self._logs = logs
        host = settings.serving.host
        reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.url = f"http://{reachable}:{settings.serving.port}"

    def deploy(self) -> None:
        """Starts Serve and the application. Raises CoterieError with what the replicas said."""
        from ray import serve

        from app.build import build

        # Serve's own progress lines repeat what we print; what goes wrong is raised.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serving = self._settings.serving
        serve.start(http_options={"host": serving.host, "port": serving.port})
        try:
            serve.run(build(self._settings), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise failure_of(str(error), f"Logs: {self._logs / 'serve'}") from error

    def await_ready(self, limit_s: float) -> None:
        """Until /ready says yes. Raises CoterieError after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            ready, details = self.ready()
            if ready:
                return
            if time.monotonic() > deadline:
                raise CoterieError(
                    f"not ready after {limit_s:.0f} s: {details}\n{self.last_log_lines()}"
                )
            time.sleep(POLL_S)

    def ready(self) -> tuple[bool, str]:
        """Whether a request would be served now, and what /ready says."""
        try:
            code, body = get_json(f"{self.url}/ready")
        except CoterieError as error:
            return False, str(error)
        return code == 200, str(body)

    def changes(self) -> Iterator[str]:
        """For ever: a line for each time that the service stops or starts being ready."""
        was_ready = True
        while True:
            time.sleep(WATCH_S)
            ready, details = self.ready()
            if ready and not was_ready:
                yield "ready again"
            if was_ready and not ready:
                yield f"not ready: {details}\n{self.last_log_lines()}"
            was_ready = ready

    def stop(self) -> None:
        """Lets running requests end within serving.drain_s, then ends Serve."""
        from ray import serve

        from deployments.drain import drain

        drain(APPLICATION, self._settings.serving.drain_s)
        with hushed():
            serve.shutdown()

    def last_log_lines(self) -> str:
        """The latest errors and warnings in the replicas' logs, and where to read on."""
        files = sorted(
            (self._logs / "serve").glob("replica_*.log"), key=lambda f: f.stat().st_mtime
        )
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
        grave = [line for line in lines if line.startswith(("ERROR", "WARNING"))]
        return "\n".join([*grave[-LOG_LINES:], f"Logs: {self._logs / 'serve'}"])


def failure_of(said: str, logs: str) -> CoterieError:
    """The error that a replica raised, found at the end of what Serve says of it."""
    raised = re.findall(r"^core\.errors\.(\w+): (.*)$", said, re.MULTILINE)
    if not raised:
        return CoterieError(f"{said}\n{logs}")
    name, message = raised[-1]
    return CoterieError(f"a replica could not start: {name}: {message}\n{logs}")
