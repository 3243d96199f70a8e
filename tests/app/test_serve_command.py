"""`coterie serve` as a user runs it: one process, a working curl line, a clean end."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.app.test_cli import DEMO_MODEL, ROOT

READY_LIMIT_S = 240
STOP_LIMIT_S = 180


class Served:
    """A running `coterie serve`, its lines, and the request of its curl line."""

    def __init__(self, scratch, *arguments):
        # The environment of the tests must not decide how a user's Ray is protected.
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "COTERIE_"))}
        self.lines = []
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from app.cli import main; main()", "serve", *arguments],
            cwd=ROOT,
            env={**environ, "TMPDIR": str(scratch), "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._ready.wait(READY_LIMIT_S), self.text
        assert "Ctrl-C stops" in self.text, self.text

    @property
    def text(self):
        return "\n".join(self.lines)

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "Ctrl-C stops" in line:
                self._ready.set()
        self._ready.set()

    def request(self):
        """(url, body) of the printed curl line, read as a shell would."""
        command = re.search(r"^curl .*?'$", self.text, re.MULTILINE | re.DOTALL).group()
        words = shlex.split(command.replace("\\\n", " "))
        return words[1], json.loads(words[words.index("-d") + 1])

    def interrupt_group(self):
        """What Ctrl-C in a terminal does: the signal reaches every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self):
        """What a service manager does: the signal reaches the command alone."""
        self.process.terminate()

    def end(self):
        code = self.process.wait(STOP_LIMIT_S)
        self._reader.join()
        return code


def heed_ctrl_c():
    # A shell that starts the tests in the background makes everything below it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def scratch():
    # Not pytest's own folder: Ray's sockets need a short path.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.serve
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stop", [Served.interrupt_group, Served.terminate])
def test_serves_the_demo_model_and_drains_when_told_to_stop(scratch, stop):
    served = Served(scratch, str(DEMO_MODEL), "--port", "0", "--set", "serving.drain_s=120")
    family = psutil.Process(served.process.pid).children(recursive=True)
    try:
        url, body = served.request()
        answer = httpx.post(url, json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == DEMO_MODEL.name
        assert answer.json()["usage"]["completion_tokens"] > 0

        sockets = [c for p in family for c in listening(p)]
        assert sockets, "Ray listens somewhere"
        assert {c.laddr.ip for c in sockets} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

        long = {**body, "stream": True, "max_tokens": 100, "ignore_eos": True}
        text = ""
        with httpx.stream("POST", url, json=long, timeout=240) as stream:
            for piece in stream.iter_text():
                if not text:
                    stop(served)
                text += piece
        assert text.rstrip().endswith("[DONE]"), "a running stream ends in peace"
        assert '"error"' not in text
    except BaseException:
        served.interrupt_group()
        raise
    assert served.end() == 0, served.text
    assert "stopped" in served.lines
    deadline = time.monotonic() + 60
    while (left := [p for p in family if p.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert not list(scratch.glob("coterie*")), "no files are left behind"


def listening(process):
    try:
        connections = process.net_connections(kind="tcp")
    except psutil.Error:
        return []
    return [c for c in connections if c.status == psutil.CONN_LISTEN]
