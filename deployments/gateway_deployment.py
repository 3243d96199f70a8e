"""The Serve deployment of the gateway: the handles that it is given, and what operators may ask."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from core.errors import SettingsError
from deployments.dispatch_rules import DispatchRule
from deployments.domain_settings import DomainSettings
from deployments.gateway import Gateway
from deployments.http_api import make_http_api
from deployments.late_receive import listen_late
from deployments.limits_client import LimitsClient
from deployments.node_address import listen_on_node_address_only
from deployments.replica_group import ReplicaGroup
from deployments.replica_plan import ReplicaPlan, rules_over
from deployments.request_labels import Labeller
from deployments.served_model import ServedModel
from deployments.served_models import ServedModels
from deployments.settings import ServingSettings
from deployments.shared_limits import SharedLimits
from deployments.supervisor_client import SupervisorClient
from deployments.text_threads import TextThreads

TROUBLE = ("UNHEALTHY", "DEPLOY_FAILED")
"""Serve's words for a deployment that has no working replica, now or for good."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Deployed replicas, as a gateway learns of them."""

    plan: ReplicaPlan
    deployment: str
    handle: DeploymentHandle


@serve.ingress()
class GatewayDeployment:
    """A gateway in a Serve replica."""

    def __init__(
        self,
        serving: ServingSettings,
        domains: DomainSettings,
        plans: Sequence[ReplicaPlan],
        deployments: Sequence[str],
        rules: Sequence[DispatchRule],
        limits: DeploymentHandle | None,
        *handles: DeploymentHandle,
    ) -> None:
        """A deployment's name and a handle for each plan; Serve makes handles of arguments."""
        listen_on_node_address_only()
        listen_late()
        self._app_name = serve.get_replica_context().app_name
        self._replicas = [Replicas(*each) for each in zip(plans, deployments, handles, strict=True)]
        threads = TextThreads()
        self._gateway = Gateway(
            ServedModels(self._models(threads), rules_over(plans, rules)),
            serving,
            threads,
            None if limits is None else LimitsClient(SharedLimits(limits), uuid.uuid4().hex),
            Labeller.open(domains),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the ASGI application of this replica."""
        return make_http_api(self._gateway)

    async def status(self) -> dict[str, float]:
        """Plain numbers about this process."""
        return self._gateway.status()

    async def deployments(self) -> dict[str, tuple[str, str]]:
        """(model, group) of each deployment of replicas."""
        return {each.deployment: (each.plan.name, each.plan.group) for each in self._replicas}

    async def reload_keys(self) -> int | str:
        """Read the keys file again: the number of keys, or why the old ones stay."""
        try:
            return await asyncio.to_thread(self._gateway.access.reload)
        except SettingsError as error:
            return str(error)

    async def reload_domains(self) -> list[str] | str:
        """Read the classifier's file again: its labels, or why the old one stays."""
        labeller = self._gateway.labeller
        try:
            return [] if labeller is None else list(await asyncio.to_thread(labeller.reload))
        except SettingsError as error:
            return str(error)

    async def tenants(self) -> dict[str, dict[str, int]]:
        """What limited tenants use now, of this gateway or, where there are several, of all."""
        return await self._gateway.limits.counts()

    def _models(self, threads: TextThreads) -> list[ServedModel]:
        of_model: dict[str, list[Replicas]] = {}
        for each in self._replicas:
            of_model.setdefault(each.plan.name, []).append(each)
        return [
            ServedModel(
                name,
                Path(parts[0].plan.model_dir),
                parts[0].plan.serving,
                [self._group(part) for part in parts],
                threads,
            )
            for name, parts in of_model.items()
        ]

    def _group(self, replicas: Replicas) -> ReplicaGroup:
        client = SupervisorClient(replicas.handle)
        return ReplicaGroup(client, replicas.plan.serving, partial(self._state, replicas))

    async def _state(self, replicas: Replicas) -> str:
        """ "running" with a running replica, Serve's word for trouble, else "idle"."""
        status = await asyncio.to_thread(serve.status)
        found = status.applications[self._app_name].deployments[replicas.deployment]
        if found.replica_states.get("RUNNING"):
            return "running"
        state = str(found.status.value)
        return state if state in TROUBLE else "idle"
