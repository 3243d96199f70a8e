"""What `coterie serve` says when replicas fail, and where it is reached."""

import os

from app.local_ray import LOCAL_ENVIRONMENT, prepare_environment
from app.local_service import LocalService, failure_of
from app.settings import Settings

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
