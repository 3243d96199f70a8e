"""`coterie doctor`: every check answers, and what would not work is an exit code."""

import json
import socket
from pathlib import Path

import pytest

from app import health_checks
from app.cli import main
from app.health_checks import READ_BYTES, findings, memory_in_use, read_speed
from app.settings import Settings
from deployments.ray_environment import source_folder
from expert_pool.kernels.build import BuildError

DEMO = Path(source_folder()) / "demo_model"


def settings(**serving):
    return Settings.model_validate({"model": str(DEMO), "serving": {"port": 0, **serving}})


def by_name(found):
    return {finding.name: finding for finding in found}


def test_the_demo_model_can_be_served_here(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(DEMO), "--json", "--port", "0"])
    said = json.loads(capsys.readouterr().out)
    assert (ended.value.code or 0) == 0 and said["works"]
    names = [check["name"] for check in said["checks"]]
    assert {"python", "packages", "memory", "disk", "port", "access"} <= set(names)


def test_too_large_a_budget_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(DEMO), "--json", "--set", "engine.scratch_memory=900TiB"])
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and not said["works"]


def test_without_a_model_only_the_machine_is_checked():
    assert not {"disk", "memory"} & set(by_name(findings(None, settings())))


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch):
    def broken():
        raise OSError("gone")

    monkeypatch.setattr(health_checks, "shared_memory", broken)
    found = by_name(findings(None, settings()))
    assert found["shared memory"].state == "error" and "gone" in found["shared memory"].found
    assert found["access"].state == "ok"


def test_the_kernels_are_named_or_what_they_need(monkeypatch):
    def not_built():
        raise BuildError("not built: run make kernels")

    monkeypatch.setattr(health_checks, "instructions", lambda: "avx2")
    assert by_name(findings(None, settings()))["kernels"].found == "native, avx2"
    monkeypatch.setattr(health_checks, "instructions", not_built)
    finding = by_name(findings(None, settings()))["kernels"]
    assert finding.state == "warning" and "make kernels" in finding.found


def test_a_taken_port_and_an_open_address_are_warnings():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = by_name(findings(None, settings(port=taken.getsockname()[1])))
        assert found["port"].state == "warning"
    assert by_name(findings(None, settings(host="::")))["access"].state == "warning"


def test_wrong_keys_are_an_error(tmp_path):
    found = by_name(findings(None, settings(keys_file=str(tmp_path / "none.yaml"))))
    assert found["access"].state == "error" and "cannot read" in found["access"].found


def test_reading_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(8 * READ_BYTES)
    monkeypatch.setattr(health_checks, "READ_BYTES", 32 * 1024**2)
    nbytes, seconds, _ = read_speed(path)
    assert nbytes == 32 * 1024**2 and seconds < 10
    path.write_bytes(b"x" * 5000)
    assert read_speed(path)[0] == 5000


def test_a_containers_limit_counts(tmp_path):
    whole = memory_in_use(tmp_path)
    assert 0 < whole[1] < whole[0]
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert memory_in_use(tmp_path) == (1000000, 300000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_in_use(tmp_path)[0] == whole[0]
