"""What an operator asks a running application, from outside of it, through Serve's handles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from core.errors import CoterieError
from deployments.replica_plan import SUPERVISOR

_ANSWER_ROOM_S = 5.0


def supervisor_deployments(app_name: str, running: bool = True) -> list[str]:
    """The deployments of replicas, of all models; only those where one runs now, or all.

    Raises CoterieError where there is no such application.
    """
    application = serve.status().applications.get(app_name)
    if application is None:
        raise CoterieError(f"there is no application {app_name!r}")
    return [
        name
        for name, deployment in application.deployments.items()
        if (name == SUPERVISOR or name.startswith(f"{SUPERVISOR}-"))
        and (not running or deployment.replica_states.get("RUNNING"))
    ]


def ask_all(
    app_name: str, deployment: str, method: str, *arguments: Any, limit_s: float
) -> list[Any]:
    """The answer of every replica. Raises CoterieError where there is none in time."""
    try:
        handle = driver_handle(deployment, app_name)
        return list(handle.broadcast(method, *arguments).results(timeout_s=limit_s))
    except (RayError, RayServeException, TimeoutError, KeyError) as error:
        raise CoterieError(
            f"{deployment} of application {app_name!r} gave no answer: {error}"
        ) from error


def drain(app_name: str, limit_s: float) -> bool:
    """Let every replica finish what runs; what is left after `limit_s` ends in an error frame.

    Call it before `serve.delete` or `serve.shutdown`, which cut connections. False where the
    application could not be asked, or some of its replicas; the others have finished even so.
    """
    try:
        names = supervisor_deployments(app_name)
    except (CoterieError, RayError, RayServeException):
        return False
    # Serve sends a broadcast only when its results are waited for, so each has a thread: all
    # replicas stop taking requests now, and none waits for another one's limit.
    pool = ThreadPoolExecutor(max(1, len(names)))
    try:
        drained = list(pool.map(lambda name: _drained(app_name, name, limit_s), names))
    finally:
        pool.shutdown(wait=False)
    return bool(names) and all(drained)


def _drained(app_name: str, deployment: str, limit_s: float) -> bool:
    """Whether all its replicas ended what ran; returns when the last one has, or cannot."""
    try:
        asked = driver_handle(deployment, app_name).broadcast("drain", limit_s)
        answers = asked.results(timeout_s=limit_s + _ANSWER_ROOM_S, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError, KeyError):
        return False
    return not any(isinstance(answer, BaseException) for answer in answers)


def driver_handle(deployment: str, app_name: str) -> DeploymentHandle:
    """A handle for a process that runs no event loop of its own, outside of Serve."""
    handle = serve.get_deployment_handle(deployment, app_name)
    if not handle.is_initialized:
        # Serve's flags for throughput would expect the caller's event loop.
        handle._init(_run_router_in_separate_loop=True)
    return handle
