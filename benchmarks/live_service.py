"""A `coterie serve` of its own process, for benchmarks and checks that want the whole of it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.errors import CoterieError

ROOT = Path(__file__).resolve().parents[1]
READY_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
LOG_CHARS = 3000


@contextmanager
def live_service(model_dir: Path, port: int, *settings: str) -> Iterator[int]:
    """The service, ready, with `settings` as in --set; stopped afterwards. Gives its port.

    Port 0 takes a free one. Raises CoterieError with the end of its log where it does not start.
    """
    if port == 0:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
    program = [sys.executable, "-c", "from app.cli import main; main()"]
    arguments = ["serve", str(model_dir), "--port", str(port)]
    arguments += [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [*program, *arguments], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            deadline_s = time.monotonic() + READY_LIMIT_S
            while not _is_ready(f"http://127.0.0.1:{port}/ready"):
                if server.poll() is not None or time.monotonic() > deadline_s:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-LOG_CHARS:]
                    raise CoterieError(f"coterie serve did not become ready:\n{said}")
                time.sleep(0.5)
            yield port
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
