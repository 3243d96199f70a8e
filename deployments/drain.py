"""The orderly end of an application: running streams finish, new requests are refused."""

from __future__ import annotations

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.application import SUPERVISOR

_ANSWER_ROOM_S = 5.0


def drain(app_name: str, limit_s: float) -> bool:
    """Let every replica finish what runs; what is left after `limit_s` ends in an error frame.

    Call it before `serve.delete` or `serve.shutdown`, which cut connections. False where the
    application could not be asked (it is gone, or its replicas are).
    """
    try:
        handle = driver_handle(SUPERVISOR, app_name)
        handle.broadcast("drain", limit_s).results(timeout_s=limit_s + _ANSWER_ROOM_S)
    except (RayError, RayServeException, TimeoutError):
        return False
    return True


def driver_handle(deployment: str, app_name: str) -> DeploymentHandle:
    """A handle for a process that runs no event loop of its own, outside of Serve."""
    handle = serve.get_deployment_handle(deployment, app_name)
    if not handle.is_initialized:
        # Serve's flags for throughput would expect the caller's event loop.
        handle._init(_run_router_in_separate_loop=True)
    return handle
