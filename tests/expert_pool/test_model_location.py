"""Folders, the local hub cache, and downloads from a hub that runs in the test."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from core.errors import CheckpointError
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.model_location import locate
from expert_pool.verify import verify_all
from tests.models.families import cached_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "someone/tiny-moe"


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a download needs. The server holds `files` and `asked`."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server = self.server
        path = self.path.partition("?")[0]
        server.asked.append(path)
        files: dict[str, bytes] = server.files
        info = {"id": MODEL, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        answers = {
            f"/api/models/{MODEL}/revision/main": json.dumps(info).encode(),
            f"/api/models/{MODEL}": json.dumps(info).encode(),
            f"/api/models/{MODEL}/tree/{COMMIT}": json.dumps(tree).encode(),
            **{f"/{MODEL}/resolve/{COMMIT}/{name}": data for name, data in files.items()},
        }
        data = answers.get(path)
        self.send_response(404 if data is None else 200)
        if data is None:
            self.send_header("X-Error-Code", "RepoNotFound")
        data = data or b"{}"
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    source = cached_checkpoint("qwen3_moe", "bfloat16", 0, 3)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.files = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    server.files["README.md"] = b"# tiny"
    server.files["pytorch_model.bin"] = b"a pickle"
    server.files["modeling_tiny.py"] = b"raise SystemExit"
    server.files["original/consolidated.safetensors"] = b"another layout"
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


_LOCATE = """
import sys
from core.errors import CheckpointError
from expert_pool.model_location import locate
try:
    print(locate(sys.argv[1], download=sys.argv[2:] == ["--download"]))
except CheckpointError as error:
    sys.exit(f"error: {error}")
assert "torch" not in sys.modules
"""


def run(hub: ThreadingHTTPServer, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`locate` in a fresh process: huggingface_hub reads its variables when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", _LOCATE, *arguments],
        env={
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_hub_id_is_downloaded_only_when_asked_and_then_found(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    refused = run(hub, tmp_path, MODEL)
    assert refused.returncode == 1
    assert "--download" in refused.stderr
    assert hub.asked == []

    fetched = run(hub, tmp_path, MODEL, "--download")
    assert fetched.returncode == 0, fetched.stderr
    folder = Path(fetched.stdout.strip())
    assert folder.is_relative_to(tmp_path)
    names = {path.name for path in folder.iterdir() if path.is_file()}
    unwanted = {"README.md", "pytorch_model.bin", "modeling_tiny.py"}
    assert names == {name for name in hub.files if "/" not in name} - unwanted
    assert not any("pytorch_model" in path or "original" in path for path in hub.asked)
    assert verify_all(CheckpointIndex.open(folder)).experts == 32

    hub.asked.clear()
    cached = run(hub, tmp_path, MODEL)
    assert Path(cached.stdout.strip()) == folder, cached.stderr
    assert hub.asked == []

    shard = next(folder.glob("*.safetensors"))
    shard.unlink()
    partial = run(hub, tmp_path, MODEL)
    assert partial.returncode == 1
    assert "partly" in partial.stderr
    assert "--download" in partial.stderr


def test_unknown_hub_id_says_so(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    unknown = run(hub, tmp_path, "someone/else", "--download")
    assert unknown.returncode == 1
    assert "someone/else" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(str(tmp_path)) == tmp_path
    (tmp_path / "named" / "like-a-hub-id").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("named/like-a-hub-id") == Path("named/like-a-hub-id")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "", " "])
def test_what_cannot_be_a_hub_id_is_a_missing_folder(model: str) -> None:
    with pytest.raises(CheckpointError, match="Expected a model folder at"):
        locate(model)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        locate(str(path))
