"""The application on a local Ray: deployed, awaited, watched, drained."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.commands.status import get_json
from app.local_ray import hushed
from app.settings import Settings
from core.errors import CoterieError

if TYPE_CHECKING:
    from ray.serve.schema import DeploymentStatusOverview

APPLICATION = "coterie"
POLL_S = 0.1
WATCH_S = 2.0
LOG_LINES = 12
_FAILED = "DEPLOY_FAILED"


class LocalService:
    """One Serve application in the Ray that this process is connected to."""

    def __init__(self, settings: Settings, logs: Path) -> None:
        self._settings = settings
        self._logs = logs
        self._is_whole = True
        """Whether all models started."""
        host = settings.serving.host
        reachable = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.url = f"http://{reachable}:{settings.serving.port}"

    def deploy(self) -> list[str]:
        """Starts Serve and the application; why each model that could not start did not.

        Raises CoterieError with what the replicas said where none could.
        """
        from ray import serve

        from app.build import build

        # Serve's own progress lines repeat what we print; what goes wrong is raised.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serving = self._settings.serving
        serve.start(http_options={"host": serving.host, "port": serving.port})
        try:
            serve.run(build(self._settings), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            logs = f"Logs: {self._logs / 'serve'}"
            started = self._await_models()
            said = {
                title: failure_of(one.message, logs)
                for title, one in self._models().items()
                if one.status.value == _FAILED
            }
            if not said:
                raise failure_of(str(error), logs) from error
            if not started:
                raise next(iter(said.values())) from error
            self._is_whole = False
            return [f"{title} is not served: {why}" for title, why in said.items()]
        return []

    def _await_models(self) -> int:
        """Deployments of models that started, once none is starting any more."""
        while "UPDATING" in (states := [one.status.value for one in self._models().values()]):
            time.sleep(POLL_S)
        return states.count("HEALTHY")

    def _models(self) -> dict[str, DeploymentStatusOverview]:
        """Serve's word on the replicas of each model, by the model's name and group's."""
        from ray import serve

        from app.build import replica_plans
        from deployments.replica_plan import deployment_names

        deployments = serve.status().applications[APPLICATION].deployments
        plans = replica_plans(self._settings)
        names = zip(plans, deployment_names(plans), strict=True)
        return {plan.title: deployments[name] for plan, name in names if name in deployments}

    def await_ready(self, limit_s: float) -> None:
        """Until /ready says yes of all models that started. Raises CoterieError after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            ready, details = self.ready()
            if ready or (not self._is_whole and self.ready_model() is not None):
                return
            if time.monotonic() > deadline:
                raise CoterieError(
                    f"not ready after {limit_s:.0f} s: {details}\n{self.last_log_lines()}"
                )
            time.sleep(POLL_S)

    def ready(self) -> tuple[bool, str]:
        """Whether a request would be served now, and what /ready says."""
        code, body = self._asked()
        return code == 200, str(body)

    def ready_model(self) -> str | None:
        """A model that is ready, or one of whose groups is; None where there is none."""
        return next((model for model, _, part in self._parts() if part["ready"]), None)

    def changes(self) -> Iterator[str]:
        """For ever: a line for each time that a model stops or starts being ready."""
        before = () if self._is_whole else self._not_ready()
        while True:
            time.sleep(WATCH_S)
            now = self._not_ready()
            if now and now != before:
                yield f"not ready: {self.ready()[1]}\n{self.last_log_lines()}"
            if before and not now:
                yield "ready again"
            before = now

    def _not_ready(self) -> tuple[str, ...]:
        """The models and groups that are not ready; the service where it does not say."""
        code, body = self._asked()
        if code == 200:
            return ()
        parts = self._parts(body)
        found = tuple(f"{model} {group}" for model, group, part in parts if not part["ready"])
        return found or (self.url,)

    def _parts(self, body: Any = None) -> list[tuple[str, str, Any]]:
        """(model, group, what /ready says of it); the group is "" where a model has none."""
        said = self._asked()[1] if body is None else body
        if not isinstance(said, dict) or "ready" not in said:
            return []
        models = said.get("models") or {self._settings.model_name(): said}
        return [
            (model, group, part)
            for model, whole in models.items()
            for group, part in (whole.get("groups") or {"": whole}).items()
        ]

    def _asked(self) -> tuple[int, Any]:
        """Status and body of /ready; 0 and the reason where nobody answers."""
        try:
            return get_json(f"{self.url}/ready")
        except CoterieError as error:
            return 0, str(error)

    def stop(self) -> None:
        """Lets running requests end within serving.drain_s, then ends Serve."""
        from ray import serve

        from deployments.running_application import drain

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
