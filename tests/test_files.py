"""What is in the checkout: sizes, and nothing that only one machine has."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {".git", ".venv", "__pycache__", "build", "dist"}
CODE = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".jinja", ""}
MAX_FILE_BYTES = 20 * 1024**2
MAX_DEMO_MODEL_BYTES = 20 * 1024**2
ROOMS = {"app", "deployments", "engine", "expert_pool", "accounting", "core", "benchmarks", "tools"}
MAX_LINES = 400
ELSEWHERE = re.compile(
    r"/work/|/root/|\.\./shared|shared/(?:data|facts|design|contract)"
    r"|pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs|deb\.debian"
)


def files():
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED and not name.endswith((".egg-info", "_cache", ".hypothesis"))
        ]
        yield from (Path(folder) / name for name in names)


def test_no_file_is_huge():
    assert not [path for path in files() if path.stat().st_size > MAX_FILE_BYTES]


def test_the_demo_model_is_small():
    sizes = [path.stat().st_size for path in (ROOT / "demo_model").rglob("*") if path.is_file()]
    assert 0 < sum(sizes) <= MAX_DEMO_MODEL_BYTES


def test_no_place_of_one_machine_and_no_package_host_is_named():
    # Only .ci/run knows what may lie beside the checkout.
    allowed = {ROOT / ".ci" / "run", Path(__file__).resolve()}
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files()
        if path.suffix in CODE and path not in allowed
        for match in ELSEWHERE.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not found


def test_a_file_is_one_noun_not_a_novel():
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in files()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in ROOMS
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not found


def test_the_architecture_page_stays_readable():
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 120
