"""All models of the service, by the names that clients use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import RequestError
from deployments.dispatch_rules import AUTO, DispatchRules
from deployments.group_load import Visit
from deployments.metrics_page import ReplicasStatus
from deployments.openai_errors import ModelNotFoundError
from deployments.openai_logprobs import Json
from deployments.replica_group import ReplicaGroup
from deployments.served_model import ServedModel, summed


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes. It counts there at once, until `visit` ends.

    As a context it ends the visit where what lies within it fails.
    """

    model: ServedModel
    group: ReplicaGroup
    visit: Visit

    def __enter__(self) -> Place:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.visit.end()


class ServedModels:
    """Finds the model and the group of replicas that a request goes to."""

    def __init__(self, models: Sequence[ServedModel], rules: DispatchRules | None = None) -> None:
        """`rules` over these models; left out, there are none."""
        self._models = {model.name: model for model in models}
        self._rules = rules or DispatchRules((), {m.name: tuple(m.groups) for m in models})
        self._created = int(time.time())

    def check(self, name: str) -> None:
        """Raises ModelNotFoundError unless a request may name it."""
        if name not in self._names:
            raise ModelNotFoundError(
                f"The model {name[:200]!r} is not served here; {_listed(self._names)}.", "model"
            )

    def named(self, name: str | None) -> ServedModel:
        """The model of that very name, the first for None.

        Raises ModelNotFoundError, RequestError for "auto".
        """
        if name is None:
            return next(iter(self._models.values()))
        self.check(name)
        if name not in self._models:
            raise RequestError(
                f"Which model {name!r} stands for depends on a request's text; expected the name "
                f"of one: {', '.join(map(repr, self._models))}.",
                "model",
            )
        return self._models[name]

    def place(self, name: str, domain: str, prompts: int = 1) -> Place:
        """Where a request for `name` goes whose texts are about `domain` ("" where unknown).

        Raises ModelNotFoundError.
        """
        self.check(name)
        route = self._rules.route(name, domain)
        model = self._models[route.model]
        group = model.group_for(route.groups)
        return Place(model, group, group.load.begin(prompts))

    def cards(self) -> list[Json]:
        """GET /v1/models."""
        return [self.card(name) for name in self._names]

    def card(self, name: str) -> Json:
        """GET /v1/models/{name}. Raises ModelNotFoundError."""
        self.check(name)
        return {"id": name, "object": "model", "created": self._created, "owned_by": "coterie"}

    @property
    def _names(self) -> list[str]:
        """All that a request may name."""
        return [*self._models, *([AUTO] if self._rules.offers_auto else [])]

    async def replicas(self) -> list[ReplicasStatus]:
        """What the replicas of each group count now."""
        places = [
            (model.name, name, group)
            for model in self._models.values()
            for name, group in model.groups.items()
        ]
        statuses = await asyncio.gather(*(group.statuses() for _, _, group in places))
        return [
            ReplicasStatus(model, name, found)
            for (model, name, _), found in zip(places, statuses, strict=True)
        ]

    async def ready(self) -> Json:
        """The readiness of all; with each one's own where there are several."""
        parts = await asyncio.gather(*(model.ready() for model in self._models.values()))
        if len(parts) == 1:
            return parts[0]
        return {**summed(parts), "models": dict(zip(self._models, parts, strict=True))}


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]!r} is"
    return "these are: " + ", ".join(map(repr, names))
