"""How a deployment of supervisors is told to Serve to be routed to."""

from __future__ import annotations

from typing import Any

from deployments.dispatch_settings import DispatchSettings

EXPERT_ROUTER = "deployments.expert_router:ExpertRouter"
_REPORT_TIMEOUT_S = 5.0


def router_options(replicas: int, dispatch: DispatchSettings, prefix_cache: bool) -> dict[str, Any]:
    """Options of `serve.deployment`; none, so Serve's own router, where there is no choice."""
    from ray.serve.config import RequestRouterConfig

    if replicas < 2 or dispatch.policy == "least_loaded":
        return {}
    return {
        "request_router_config": RequestRouterConfig(
            request_router_class=EXPERT_ROUTER,
            request_router_kwargs={
                "settings": dispatch.model_dump(mode="json"),
                "prefix_cache": prefix_cache,
            },
            request_routing_stats_period_s=dispatch.report_period_s,
            request_routing_stats_timeout_s=_REPORT_TIMEOUT_S,
        )
    }
