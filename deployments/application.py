"""The Serve application: one gateway deployment before the replicas of all models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.dispatch_rules import DispatchRule
from deployments.dispatch_settings import DispatchSettings
from deployments.domain_settings import DomainSettings
from deployments.gateway_deployment import GatewayDeployment
from deployments.limits_client import Limits
from deployments.replica_plan import (
    ENGINE_FACTORY,
    ReplicaPlan,
    deployment_names,
    rules_over,
)
from deployments.router_options import router_options
from deployments.settings import REFUSAL_ROOM, ServingSettings, check_sizes
from deployments.supervisor import Supervisor

GATEWAY = "Gateway"
LIMITS = "Limits"
_LIMITS_CALLS = 10_000
_SHUTDOWN_ROOM_S = 5.0
_CONSTRUCTOR_TRIES = 2
_BUSY_RETRY_S = 2
# The proxy logs each request; a line from each of our replicas too would only cost time.
_LOGGING = {"enable_access_log": False}
_DISPATCH = DispatchSettings()
_DOMAINS = DomainSettings()


def application(
    model_name: str,
    model_dir: Path,
    serving: ServingSettings,
    engine: dict[str, Any],
    pool: dict[str, Any],
    engine_factory: str = ENGINE_FACTORY,
    objectives: dict[str, Any] | None = None,
    dispatch: DispatchSettings = _DISPATCH,
    domains: DomainSettings = _DOMAINS,
) -> Application:
    """The application that serves one model folder alone; see `application_of`."""
    plan = ReplicaPlan(
        model_name, str(model_dir), serving, engine, pool, engine_factory=engine_factory
    )
    return application_of([plan], serving, objectives, dispatch, domains)


def application_of(
    plans: Sequence[ReplicaPlan],
    serving: ServingSettings,
    objectives: dict[str, Any] | None = None,
    dispatch: DispatchSettings = _DISPATCH,
    domains: DomainSettings = _DOMAINS,
    rules: Sequence[DispatchRule] = (),
) -> Application:
    """The application that serves what `plans` say, the first model being the default.

    `serving` is what they have in common. Raises SettingsError where sizes or rules contradict.
    """
    rules_over(plans, rules)
    names = deployment_names(plans)
    supervisors = [
        _supervisor(plan, objectives or {}, name, dispatch)
        for plan, name in zip(plans, names, strict=True)
    ]
    gateway = serve.deployment(GatewayDeployment, name=GATEWAY).options(
        num_replicas=serving.gateways,
        # Admission is the supervisors' matter; the gateway only has to hold what they hold.
        max_ongoing_requests=sum(
            (plan.ongoing + REFUSAL_ROOM) * plan.serving.replicas for plan in plans
        )
        + REFUSAL_ROOM,
        max_queued_requests=REFUSAL_ROOM,
        backpressure_config={"status_code": 503, "retry_after_s": _BUSY_RETRY_S},
        graceful_shutdown_timeout_s=serving.drain_s + _SHUTDOWN_ROOM_S,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=_LOGGING,
    )
    limits = None
    if serving.gateways > 1:
        # Tenants' limits hold for the service, so several gateways count in one place.
        limits = (
            serve.deployment(Limits, name=LIMITS)
            .options(
                max_ongoing_requests=_LIMITS_CALLS,
                ray_actor_options={"num_cpus": 0.1},
                logging_config=_LOGGING,
            )
            .bind()
        )
    return gateway.bind(serving, domains, list(plans), names, list(rules), limits, *supervisors)


def _supervisor(
    plan: ReplicaPlan, objectives: dict[str, Any], name: str, dispatch: DispatchSettings
) -> Application:
    serving = plan.serving
    check_sizes(serving, plan.max_sequences, plan.engine.get("context_tokens"))
    replicas: dict[str, Any] = {"num_replicas": serving.replicas}
    if serving.min_replicas is not None and serving.min_replicas < serving.replicas:
        replicas = {
            "autoscaling_config": {
                "min_replicas": serving.min_replicas,
                "max_replicas": serving.replicas,
                "target_ongoing_requests": max(1, plan.max_sequences),
            }
        }
    deployment = serve.deployment(Supervisor, name=name).options(
        max_ongoing_requests=plan.ongoing,
        max_queued_requests=REFUSAL_ROOM * serving.replicas,
        graceful_shutdown_timeout_s=serving.drain_s + _SHUTDOWN_ROOM_S,
        max_constructor_retry_count=_CONSTRUCTOR_TRIES,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=_LOGGING,
        **replicas,
        **router_options(serving.replicas, dispatch, bool(plan.engine.get("prefix_cache", True))),
    )
    settings = {
        "model": plan.model_dir,
        "engine": plan.engine,
        "pool": plan.pool,
        "objectives": objectives,
    }
    return deployment.bind(plan.model_dir, serving, plan.engine_factory, settings)
