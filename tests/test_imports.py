"""Rooms import one way, Ray and torch only where they may be; `__init__` files are empty."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "core": set(),
    "accounting": {"core"},
    "expert_pool": {"core"},
    "engine": {"core", "expert_pool"},
    "deployments": {"core", "expert_pool", "engine", "accounting"},
    "app": {"core", "expert_pool", "engine", "deployments", "accounting"},
}
OUTSIDE = {"benchmarks", "tests", "tools"}
PRIVATE = "expert_pool/transformers_private.py"
PRIVATE_MODULES = ("transformers.conversion_mapping", "transformers.core_model_loading")


def modules(room):
    return sorted((ROOT / room).rglob("*.py"))


def is_deferred(node):
    """Functions, and what only type checkers see."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def imported(tree):
    """(module, whether importing the file does not import it) of every import."""
    deferred = {
        id(node) for outer in ast.walk(tree) if is_deferred(outer) for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in deferred
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the room, so that they can be checked"
            yield node.module, id(node) in deferred


def wrong_imports(room, source):
    """What of `source`, a file of `room`, breaks the rules."""
    for module, deferred in imported(ast.parse(source)):
        top = module.split(".")[0]
        if top in (MAY_IMPORT.keys() | OUTSIDE) - MAY_IMPORT[room] - {room}:
            yield f"{room} must not import {module}"
        if top == "ray" and room != "deployments" and not (room == "app" and deferred):
            yield f"{room} must not import Ray here"
        if top in ("torch", "transformers") and room == "core":
            yield f"core must not import {module}"


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_one_way(room):
    found = [
        f"{path.relative_to(ROOT)}: {wrong}"
        for path in modules(room)
        for wrong in wrong_imports(room, path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "import engine.settings"),
        ("core", "def f():\n    from torch import nn"),
        ("engine", "from deployments.gateway import Gateway"),
        ("engine", "def f():\n    import ray"),
        ("app", "import ray"),
        ("expert_pool", "from accounting import prices"),
        ("deployments", "from tests.models import families"),
    ],
)
def test_the_rules_see_a_breach(room, source):
    assert list(wrong_imports(room, source))


def test_ray_inside_a_function_of_app_is_allowed():
    assert not list(wrong_imports("app", "def f():\n    from ray import serve"))


@pytest.mark.parametrize("room", [*MAY_IMPORT, *sorted(OUTSIDE)])
def test_init_files_are_empty(room):
    # No re-exports: a name has one place to be imported from.
    assert not [path for path in modules(room) if path.name == "__init__.py" and path.read_text()]


def test_private_parts_of_transformers_are_touched_in_one_file():
    found = []
    for room in MAY_IMPORT:
        for path in modules(room):
            name = path.relative_to(ROOT).as_posix()
            if name == PRIVATE:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "transformers"
                ):
                    private = [a.name for a in node.names if a.name.startswith("_")]
                    if private or node.module.startswith(PRIVATE_MODULES):
                        found.append(f"{name}: {node.module} {private}")
    assert not found


def importable(room):
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in modules(room)
        if path.name != "__init__.py"
    ]


def test_gateway_supervisor_settings_and_command_line_import_no_torch():
    names = importable("core") + importable("deployments") + importable("app")
    names += ["engine.settings", "expert_pool.settings", "expert_pool.model_location"]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_core_imports_nothing_heavy():
    program = (
        f"import importlib, sys\n"
        f"for name in {importable('core')!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'ray', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
