"""A local Ray leaves nothing behind, however it ends."""

import os
import tempfile
from types import SimpleNamespace

import pytest
import ray

from app.local_ray import local_ray
from core.errors import CoterieError


@pytest.fixture(autouse=True)
def no_ray(monkeypatch, tmp_path):
    """Folders in `tmp_path` (its name is too long for Ray, so not asked for), and no real Ray."""
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix, dir: _made(tmp_path / "session"))
    monkeypatch.setattr(ray, "init", lambda **named: _context(named["_temp_dir"]))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setenv("TMPDIR", "/somewhere")
    yield
    assert os.environ["TMPDIR"] == "/somewhere"


def _made(path):
    path.mkdir()
    return str(path)


def _context(folder):
    return SimpleNamespace(address_info={"address": "127.0.0.1:1", "session_dir": folder})


def test_a_normal_end_leaves_no_folder(tmp_path):
    with local_ray():
        assert os.environ["TMPDIR"] == str(tmp_path / "session")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["while Ray starts", "while it runs"])
def test_an_interrupt_leaves_no_folder(tmp_path, monkeypatch, when):
    def interrupt(**named):
        raise KeyboardInterrupt

    if when == "while Ray starts":
        monkeypatch.setattr(ray, "init", interrupt)
    with pytest.raises(KeyboardInterrupt), local_ray():
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_failure_keeps_the_logs_and_says_where(tmp_path, monkeypatch):
    def fail(**named):
        raise RuntimeError("no port is free")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(CoterieError, match=r"no port is free.*session"), local_ray():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["session"]
