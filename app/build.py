"""From settings to the Serve application; `import_path: app.build:build` in a Serve YAML."""

# No postponed annotations here: Serve looks at the parameter's class to make it from YAML.

from typing import TYPE_CHECKING

from app.settings import Settings
from deployments.dispatch_rules import DispatchRules
from deployments.replica_plan import ReplicaPlan

if TYPE_CHECKING:
    from ray.serve import Application


def build(settings: Settings) -> "Application":
    """The application that `settings` describe. Raises CheckpointError and SettingsError."""
    from deployments.application import application_of
    from deployments.domain_classifier import checked

    served_rules(settings)
    return application_of(
        replica_plans(settings),
        settings.serving,
        objectives=settings.objectives.model_dump(mode="json"),
        dispatch=settings.dispatch,
        domains=checked(settings.domains),
        rules=settings.rules,
    )


def replica_plans(settings: Settings) -> list[ReplicaPlan]:
    """One a deployment of replicas, the first model's first. Raises CheckpointError."""
    from expert_pool.model_location import locate

    return [
        ReplicaPlan(
            entry.name,
            # Replicas run in a working directory of their own.
            str(locate(str(entry.model)).resolve()),
            settings.serving_of(entry),
            entry.engine.model_dump(mode="json"),
            entry.pool.model_dump(mode="json"),
        )
        for entry in settings.entries()
    ]


def served_rules(settings: Settings) -> DispatchRules:
    """The rules, whose domains are such as a text can have. Raises SettingsError."""
    from deployments.domain_classifier import load_classifier

    if not settings.rules:
        return settings.dispatch_rules()
    classifier = load_classifier(settings.domains)
    known = () if classifier is None else classifier.labels
    return settings.dispatch_rules([*known, *settings.domains.labels])
