"""One Ray and one Serve for all live tests; each application is deployed once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.local_ray import local_ray
from deployments.ray_environment import source_folder
from deployments.settings import ServingSettings
from tests.conftest import MAX_BODY_BYTES
from tests.serving.tiny_model_folder import make_folder

FAKE_SERVING = ServingSettings(
    heartbeat_timeout_s=6.0,
    step_timeout_s=3.0,
    rank_wait_s=30.0,
    drain_s=6.0,
    max_queued_requests=400,
    max_body_bytes=MAX_BODY_BYTES,
)
FAKE_ENGINE = {"max_sequences": 8, "context_tokens": 100_000, "kv_memory": 100_000}


@dataclass(frozen=True)
class LiveApp:
    name: str
    url: str
    model: str

    def status(self) -> dict[str, float]:
        return self._ask("Supervisor")

    def gateway_status(self) -> dict[str, float]:
        return self._ask("Gateway")

    def _ask(self, deployment: str) -> dict[str, float]:
        from deployments.running_application import driver_handle

        return driver_handle(deployment, self.name).status.remote().result(timeout_s=30)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def live_serve() -> Iterator[str]:
    """Ray and Serve on 127.0.0.1; the URL of the proxy."""
    from ray import serve

    with local_ray(num_cpus=8):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()


def deploy(name: str, url: str, model: str, application: Any) -> LiveApp:
    from ray import serve

    serve.run(application, name=name, route_prefix=f"/{name}")
    return LiveApp(name, f"{url}/{name}", model)


@pytest.fixture(scope="session")
def fake_app(live_serve: str, tiny_folder: Path) -> LiveApp:
    """An application whose engine emits forced ids."""
    from deployments.application import application

    factory = "tests.serving.fake_engines:open_engine"
    built = application("tiny", tiny_folder, FAKE_SERVING, FAKE_ENGINE, {}, factory)
    return deploy("fake", live_serve, "tiny", built)


DEMO_MODEL = Path(source_folder()) / "demo_model"
DEMO_ENGINE = {"max_sequences": 8, "kv_memory": 32 * 1024**2, "threads": 1}
DEMO_POOL = {"expert_memory": "75%"}


@pytest.fixture(scope="session")
def demo_app(live_serve: str) -> LiveApp:
    """The bundled model, with slots for three quarters of its experts."""
    from app.build import build
    from app.settings import Settings

    serving = {"model_name": "demo", "drain_s": 5.0, "rank_wait_s": 120.0}
    parts = {"engine": DEMO_ENGINE, "pool": DEMO_POOL, "serving": serving}
    settings = Settings.model_validate({"model": str(DEMO_MODEL), **parts})
    return deploy("demo", live_serve, "demo", build(settings))
