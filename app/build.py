"""From settings to the Serve application; `import_path: app.build:build` in a Serve YAML."""

# No postponed annotations here: Serve looks at the parameter's class to make it from YAML.

from pathlib import Path
from typing import TYPE_CHECKING

from app.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application


def build(settings: Settings) -> "Application":
    """The application that `settings` describe. Raises CheckpointError and SettingsError."""
    from deployments.application import application
    from expert_pool.model_location import locate

    return application(
        model_name(settings),
        # Replicas run in a working directory of their own.
        locate(settings.model).resolve(),
        settings.serving,
        settings.engine.model_dump(mode="json"),
        settings.pool.model_dump(mode="json"),
        objectives=settings.objectives.model_dump(mode="json"),
    )


def model_name(settings: Settings) -> str:
    """The name clients use: as set, else the folder's name, else the hub id."""
    if settings.serving.model_name is not None:
        return settings.serving.model_name
    path = Path(settings.model)
    return path.resolve().name if path.is_dir() else settings.model
