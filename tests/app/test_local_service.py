"""What `coterie serve` says when replicas fail, and where it is reached."""

import os
from types import SimpleNamespace

import pytest

from app import build, local_service
from app.local_ray import LOCAL_ENVIRONMENT, prepare_environment
from app.local_service import LocalService, failure_of
from app.settings import Settings
from core.errors import CoterieError
from deployments.replica_plan import ReplicaPlan

SAID = """Failed to update the deployments ['Supervisor'].
The deployment failed to start 2 times in a row. Error:
RuntimeError: Traceback (most recent call last):
  File "deployments/supervisor.py", line 75, in __init__
core.errors.BudgetError: expert memory: need 9 bytes, have 3 bytes
"""


def test_the_error_of_a_replica_is_found_in_what_serve_says():
    said = str(failure_of(SAID, "Logs: /tmp/logs"))
    assert "BudgetError: expert memory: need 9 bytes, have 3 bytes" in said
    assert "Logs: /tmp/logs" in said
    assert "Traceback" not in said


def test_what_is_no_error_of_ours_is_shown_whole():
    assert "segmentation fault" in str(failure_of("worker: segmentation fault", "Logs: x"))


def test_a_service_on_all_interfaces_is_asked_on_loopback(tmp_path):
    settings = Settings.model_validate({"model": "m", "serving": {"host": "0.0.0.0", "port": 9}})
    assert LocalService(settings, tmp_path).url == "http://127.0.0.1:9"


def two_models():
    second = {"name": "coder", "model": "c"}
    return Settings.model_validate({"model": "m", "models": [second]})


def deploy_with(monkeypatch, tmp_path, *states):
    """`LocalService.deploy` where Serve says these states of both models, one after the other."""
    from ray import serve

    names = ("Supervisor", "Supervisor-coder")
    told = [
        SimpleNamespace(
            applications={
                "coterie": SimpleNamespace(
                    deployments={
                        name: SimpleNamespace(status=SimpleNamespace(value=value), message=SAID)
                        for name, value in zip(names, pair, strict=True)
                    }
                )
            }
        )
        for pair in states
    ]

    def run(*arguments, **names):
        raise RuntimeError("Failed to update the deployments")

    monkeypatch.setattr(serve, "start", lambda **names: None)
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(serve, "status", lambda: told.pop(0) if len(told) > 1 else told[0])
    monkeypatch.setattr(build, "build", lambda settings: None)
    monkeypatch.setattr(
        build,
        "replica_plans",
        lambda settings: [
            ReplicaPlan(entry.name, "", settings.serving) for entry in settings.entries()
        ],
    )
    service = LocalService(two_models(), tmp_path)
    return service, service.deploy()


def test_a_model_that_cannot_start_is_told_and_the_others_are_waited_for(monkeypatch, tmp_path):
    states = [("UPDATING", "DEPLOY_FAILED"), ("HEALTHY", "DEPLOY_FAILED")]
    service, (said,) = deploy_with(monkeypatch, tmp_path, *states)
    assert said.startswith("coder is not served: a replica could not start: BudgetError")
    half = {"ready": False, "models": {"m": {"ready": True}, "coder": {"ready": False}}}
    monkeypatch.setattr(local_service, "get_json", lambda url: (503, half))
    service.await_ready(0.0)
    assert service.ready_model() == "m"


@pytest.mark.parametrize("several", [True, False])
def test_a_group_that_cannot_start_leaves_the_others_serving(monkeypatch, tmp_path, several):
    states = [("HEALTHY", "DEPLOY_FAILED")]
    service, _ = deploy_with(monkeypatch, tmp_path, *states)
    groups = {"large": {"ready": True}, "small": {"ready": False}}
    said = {"ready": False, "groups": groups}
    if several:
        said = {"ready": False, "models": {"coder": {"ready": False}, "m": said}}
    monkeypatch.setattr(local_service, "get_json", lambda url: (503, said))
    service.await_ready(0.0)
    assert service.ready_model() == "m"


def test_each_group_that_stops_being_ready_is_told(monkeypatch, tmp_path):
    def says(**ready):
        groups = {name: {"ready": value} for name, value in ready.items()}
        return 503, {"ready": False, "groups": groups}

    service = LocalService(Settings(model="m"), tmp_path)
    monkeypatch.setattr(local_service, "WATCH_S", 0.0)
    now = iter([(200, {}), says(a=True, b=False), says(a=False, b=False), (200, {})])
    monkeypatch.setattr(service, "_asked", lambda: next(now))
    monkeypatch.setattr(service, "ready", lambda: (False, "details"))
    changes = service.changes()
    said = [next(changes).partition("\n")[0] for _ in range(3)]
    assert said == ["not ready: details", "not ready: details", "ready again"]


def test_nothing_is_served_where_no_model_could_start(monkeypatch, tmp_path):
    with pytest.raises(CoterieError, match="BudgetError: expert memory"):
        deploy_with(monkeypatch, tmp_path, ("DEPLOY_FAILED", "DEPLOY_FAILED"))


def test_each_change_of_a_models_readiness_is_told_once(monkeypatch, tmp_path):
    def says(**ready):
        models = {name: {"ready": value} for name, value in ready.items()}
        whole = all(ready.values())
        return (200 if whole else 503), {"ready": whole, "models": models}

    answers = [
        says(m=True, coder=True),
        says(m=True, coder=False),
        says(m=True, coder=False),
        says(m=False, coder=False),
        says(m=True, coder=True),
    ]
    service = LocalService(two_models(), tmp_path)
    monkeypatch.setattr(local_service, "WATCH_S", 0.0)
    now = iter(answers)
    monkeypatch.setattr(service, "_asked", lambda: next(now))
    monkeypatch.setattr(service, "ready", lambda: (False, "details"))
    changes = service.changes()
    assert [next(changes).partition("\n")[0] for _ in range(3)] == [
        "not ready: details",
        "not ready: details",
        "ready again",
    ]


def test_grave_lines_of_the_replicas_logs_are_shown(tmp_path):
    logs = tmp_path / "serve"
    logs.mkdir()
    (logs / "replica_coterie_Supervisor_a.log").write_text(
        "INFO fine\nERROR 2026 replica -- the rank died\nWARNING again\n", encoding="utf-8"
    )
    lines = LocalService(Settings(model="m"), tmp_path).last_log_lines().splitlines()
    assert lines[:2] == ["ERROR 2026 replica -- the rank died", "WARNING again"]


def test_a_local_ray_is_private_unless_the_user_says_otherwise(monkeypatch):
    for name in (*LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONPATH"):
        # Set and then deleted, so that it is taken back after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("COTERIE_PROXY_MAX_BODY_BYTES", "")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    prepare_environment(max_body_bytes=123)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1", "what the user set stays"
    assert os.environ["COTERIE_PROXY_MAX_BODY_BYTES"] == "123"
    first = os.environ["RAY_AUTH_TOKEN"]
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    prepare_environment(max_body_bytes=123)
    assert os.environ["RAY_AUTH_TOKEN"] != first, "each run has a secret of its own"
