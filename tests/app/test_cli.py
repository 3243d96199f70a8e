"""The command line: quick, strict, and its failures are one readable line."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "demo_model"


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs one command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call


def test_help_is_quick_and_loads_nothing_heavy():
    program = (
        "import sys\n"
        "from app.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(str({'torch', 'ray', 'transformers', 'pydantic'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stderr.strip() == "set()"
    assert "coterie serve MODEL --expert-memory 8GiB" in result.stdout


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), ["config", "show"]])
def test_each_command_teaches_by_example(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert out.count(f"coterie {' '.join(command)}") >= 2, "usage and an example"


def test_no_arguments_print_help(run):
    code, out, err = run()
    assert (code, err) == (2, "")
    assert "config" in out


def test_the_version_is_printed(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("coterie ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serv"], "serve"),
        (["serve", "--prot", "1"], "--port"),
        (["config", "shwo"], "show"),
        (["serve", "--set", "engine.seed"], "KEY=VALUE"),
        (["serve", "m", "--set", "engine.sed=1"], "engine.seed"),
        (["serve", "m", "--port", "http"], "serving.port"),
        (["serve", "m", "--expert-memory", "8Gb"], "8GiB"),
        (["serve"], "model is not set"),
        (["serve", "--config", "no-such.yaml"], "no-such.yaml"),
        (["serve", "m", "--max-sequences", "9999"], "max_sequences"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, arguments, said):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert said in err


def test_a_model_that_is_nowhere_is_a_failure(run, tmp_path):
    code, _, err = run("serve", str(tmp_path / "none"))
    assert code == 1
    assert err.startswith("error: ")
    assert "none" in err


def test_a_taken_port_is_named_before_anything_starts(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", str(DEMO_MODEL), "--port", str(port))
    assert code == 1
    assert f"127.0.0.1:{port}" in err


def test_a_broken_checkpoint_is_named_before_ray_starts(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(DEMO_MODEL, broken)
    (broken / "model.safetensors").unlink()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", "from app.cli import main; main()", "serve", broken, "--port", "0"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(scratch), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "safetensors" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(scratch.glob("coterie-*")), "Ray must not have been started"


def test_config_show_prints_values_and_their_origins(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_ENGINE__SEED", "7")
    (tmp_path / "c.yaml").write_text("serving:\n  port: 9\n", encoding="utf-8")
    arguments = ["config", "show", "m", "--config", str(tmp_path / "c.yaml"), "--replicas", "2"]
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    rows = json.loads(out)
    assert rows["model"] == {"value": "m", "origin": "command line"}
    assert rows["engine.seed"] == {"value": 7, "origin": "COTERIE_ENGINE__SEED"}
    assert rows["serving.port"] == {"value": 9, "origin": "c.yaml:2"}
    assert rows["serving.replicas"] == {"value": 2, "origin": "--replicas"}
    assert rows["engine.dtype"]["origin"] == "default"
    code, out, _ = run(*arguments)
    assert code == 0
    assert [line.split() for line in out.splitlines() if "engine.seed" in line] == [
        ["engine.seed", "7", "COTERIE_ENGINE__SEED"]
    ]


def test_config_show_prints_entries(run, tmp_path):
    path = tmp_path / "c.yaml"
    text = (
        "model: m\nengine: {seed: 3}\nmodels:\n- {name: a, model: b, engine: {kv_memory: 2GiB}}\n"
    )
    path.write_text(text, encoding="utf-8")
    arguments = ["config", "show", "--config", str(path), "--also", "third=t"]
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    rows = json.loads(out)
    assert rows["models.1.name"] == {"value": "third", "origin": "--also"}
    assert rows["models.0.engine.seed"] == {"value": 3, "origin": "engine.seed, c.yaml:2"}
    code, out, _ = run(*arguments)
    lines = [line.split() for line in out.splitlines()]
    assert ["models.0.engine.kv_memory", "2GiB", "c.yaml:4"] in lines
    assert not [line for line in lines if line[0] == "models.0.engine.device"]
    code, _, err = run(*arguments, "--also", "nothing")
    assert code == 2 and "--also takes NAME=MODEL" in err


@pytest.mark.parametrize("name", ["x[/y]", "x[red]y", "x:rocket:"])
def test_config_show_shows_odd_names_as_they_are(run, name):
    code, out, _ = run("config", "show", "m", "--also", f"{name}=c")
    assert code == 0 and name in out


def test_config_show_needs_no_model(run):
    code, out, _ = run("config", "show", "--json")
    assert code == 0
    assert json.loads(out)["model"]["value"] == "(not set)"
