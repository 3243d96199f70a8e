"""The Serve application: one gateway deployment before the replicas of the model."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from core.errors import SettingsError
from deployments.gateway import Gateway
from deployments.http_api import make_http_api
from deployments.late_receive import listen_late
from deployments.limits_client import Limits, LimitsClient
from deployments.node_address import listen_on_node_address_only
from deployments.settings import REFUSAL_ROOM, ServingSettings, check_sizes
from deployments.shared_limits import SharedLimits
from deployments.supervisor import Supervisor
from deployments.supervisor_client import SupervisorClient

ENGINE_FACTORY = "engine.engine:open_engine"
GATEWAY = "Gateway"
SUPERVISOR = "Supervisor"
LIMITS = "Limits"
_LIMITS_CALLS = 10_000
_SHUTDOWN_ROOM_S = 5.0
_CONSTRUCTOR_TRIES = 2
_BUSY_RETRY_S = 2
# The proxy logs each request; a line from each of our replicas too would only cost time.
_LOGGING = {"enable_access_log": False}


@serve.ingress()
class GatewayDeployment:
    """A gateway in a Serve replica."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        serving: ServingSettings,
        handle: DeploymentHandle,
        limits: DeploymentHandle | None = None,
    ) -> None:
        listen_on_node_address_only()
        listen_late()
        may_idle = serving.min_replicas == 0
        self._app_name = serve.get_replica_context().app_name
        self._gateway = Gateway(
            model_name,
            Path(model_dir),
            serving,
            SupervisorClient(handle),
            self._model_state if may_idle else None,
            None if limits is None else LimitsClient(SharedLimits(limits), uuid.uuid4().hex),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the ASGI application of this replica."""
        return make_http_api(self._gateway)

    async def status(self) -> dict[str, float]:
        """Plain numbers about this process."""
        return self._gateway.status()

    async def reload_keys(self) -> int | str:
        """Read the keys file again: the number of keys, or why the old ones stay."""
        try:
            return await asyncio.to_thread(self._gateway.access.reload)
        except SettingsError as error:
            return str(error)

    async def tenants(self) -> dict[str, dict[str, int]]:
        """What limited tenants use now, of this gateway or, where there are several, of all."""
        return await self._gateway.limits.counts()

    async def _model_state(self) -> str:
        """ "running" with a running replica, Serve's word for trouble, else "idle"."""
        status = await asyncio.to_thread(serve.status)
        deployment = status.applications[self._app_name].deployments[SUPERVISOR]
        if deployment.replica_states.get("RUNNING"):
            return "running"
        state = str(deployment.status.value)
        return state if state in ("UNHEALTHY", "DEPLOY_FAILED") else "idle"


def application(
    model_name: str,
    model_dir: Path,
    serving: ServingSettings,
    engine: dict[str, Any],
    pool: dict[str, Any],
    engine_factory: str = ENGINE_FACTORY,
    objectives: dict[str, Any] | None = None,
) -> Application:
    """The application that serves one model folder.

    `engine` and `pool` are those rooms' settings as plain dicts; `engine_factory` is
    "module:function" and runs in the rank. Raises SettingsError where sizes contradict.
    """
    max_sequences = int(engine.get("max_sequences", 1))
    check_sizes(serving, max_sequences, engine.get("context_tokens"))
    ongoing = serving.max_ongoing_requests + REFUSAL_ROOM
    shutdown_s = serving.drain_s + _SHUTDOWN_ROOM_S
    replicas: dict[str, Any] = {"num_replicas": serving.replicas}
    if serving.min_replicas is not None and serving.min_replicas < serving.replicas:
        replicas = {
            "autoscaling_config": {
                "min_replicas": serving.min_replicas,
                "max_replicas": serving.replicas,
                "target_ongoing_requests": max(1, max_sequences),
            }
        }
    supervisor = serve.deployment(Supervisor, name=SUPERVISOR).options(
        max_ongoing_requests=ongoing,
        max_queued_requests=REFUSAL_ROOM * serving.replicas,
        graceful_shutdown_timeout_s=shutdown_s,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=_LOGGING,
        **replicas,
    )
    settings = {
        "model": str(model_dir),
        "engine": engine,
        "pool": pool,
        "objectives": objectives or {},
    }
    gateway = serve.deployment(GatewayDeployment, name=GATEWAY).options(
        num_replicas=serving.gateways,
        # Admission is the supervisors' matter; the gateway only has to hold what they hold.
        max_ongoing_requests=(ongoing + REFUSAL_ROOM) * serving.replicas + REFUSAL_ROOM,
        max_queued_requests=REFUSAL_ROOM,
        backpressure_config={"status_code": 503, "retry_after_s": _BUSY_RETRY_S},
        graceful_shutdown_timeout_s=shutdown_s,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=_LOGGING,
    )
    handle = supervisor.bind(str(model_dir), serving, engine_factory, settings)
    if serving.gateways == 1:
        return gateway.bind(model_name, str(model_dir), serving, handle)
    # Tenants' limits hold for the service, so several gateways count in one place.
    limits = serve.deployment(Limits, name=LIMITS).options(
        max_ongoing_requests=_LIMITS_CALLS,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=_LOGGING,
    )
    return gateway.bind(model_name, str(model_dir), serving, handle, limits.bind())
