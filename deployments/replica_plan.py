"""The replicas of one model, or one group of them, as they are to be deployed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.dispatch_rules import DispatchRule, DispatchRules
from deployments.settings import REFUSAL_ROOM, ServingSettings

ENGINE_FACTORY = "engine.engine:open_engine"
SUPERVISOR = "Supervisor"
"""The deployment of the first model's replicas; the names of others begin with it and a dash."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One deployment of supervisors."""

    name: str
    """What clients call the model."""
    model_dir: str
    serving: ServingSettings
    """With the number of these replicas, and the name of their group."""
    engine: dict[str, Any] = field(default_factory=dict)
    """The engine's settings as a plain dict."""
    pool: dict[str, Any] = field(default_factory=dict)
    """The expert pool's, likewise."""
    engine_factory: str = ENGINE_FACTORY
    """"module:function"; runs in the rank."""

    @property
    def group(self) -> str:
        """Name of these replicas among those of the model; "" where it has no groups."""
        return self.serving.group

    @property
    def title(self) -> str:
        """The model's name, and its group's where it has one."""
        return f"{self.name} ({self.group})" if self.group else self.name

    @property
    def max_sequences(self) -> int:
        """Most sequences that one replica runs at once."""
        return int(self.engine.get("max_sequences", 1))

    @property
    def ongoing(self) -> int:
        """Calls that Serve may hand to one replica."""
        return self.serving.max_ongoing_requests + REFUSAL_ROOM


def rules_over(plans: Sequence[ReplicaPlan], rules: Sequence[DispatchRule]) -> DispatchRules:
    """The rules over what `plans` deploy, the first model being the default.

    Raises SettingsError.
    """
    groups: dict[str, list[str]] = {}
    for plan in plans:
        groups.setdefault(plan.name, []).append(plan.group)
    return DispatchRules(rules, groups)


def deployment_names(plans: Sequence[ReplicaPlan]) -> list[str]:
    """The Serve deployment of each; names become parts of files', so they have no odd letters."""
    names: list[str] = []
    for plan in plans:
        label = "-".join(part for part in (plan.name, plan.group) if part)
        name = f"{SUPERVISOR}-{re.sub(r'[^A-Za-z0-9_.]+', '-', label)}" if names else SUPERVISOR
        while name in names:
            name += "-2"
        names.append(name)
    return names
