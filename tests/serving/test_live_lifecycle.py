"""An application from nothing to its end: cold start, a lost replica, an orderly stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serving import fake_engines
from tests.serving.conftest import FAKE_ENGINE, FAKE_SERVING, LiveApp, deploy
from tests.serving.http_client import DONE, events, post
from tests.waiting import until

pytestmark = pytest.mark.serve

TEXT = "/v1/completions"
SLOW: dict[str, Any] = {
    "model": "tiny",
    "prompt": "xyz",
    "stream": True,
    "seed": fake_engines.SLOW_MS + 20,
}


@pytest.fixture(scope="module")
def app(live_serve: str, tiny_folder: Path) -> Iterator[LiveApp]:
    """Allowed to run no replica at all while nobody asks."""
    from ray import serve

    from deployments.application import application

    serving = FAKE_SERVING.model_copy(update={"min_replicas": 0})
    factory = "tests.serving.fake_engines:open_engine"
    built = application("tiny", tiny_folder, serving, FAKE_ENGINE, {}, factory)
    yield deploy("cold", live_serve, "tiny", built)
    serve.delete("cold")


def test_ready_without_a_replica_and_served_on_demand(app: LiveApp) -> None:
    ready = httpx.get(app.url + "/ready")
    assert (ready.status_code, ready.json()["replicas"]) == (200, 0)
    answer = post(app.url, TEXT, {"model": "tiny", "prompt": "abc"})
    assert answer.status_code == 200, answer.text
    assert httpx.get(app.url + "/ready").json()["ready_replicas"] == 1


def test_a_lost_replica_ends_its_streams_and_is_replaced(app: LiveApp) -> None:
    status = app.status()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(post, app.url, TEXT, {**SLOW, "max_tokens": 5000})
        until(lambda: app.status()["engine_running"])
        os.kill(int(status["pid"]), signal.SIGKILL)
        received = events(stream.result().text)
    assert received[-2]["error"]["code"] == "engine_unavailable" and received[-1] == DONE
    deadline = time.monotonic() + 60
    body = {"model": "tiny", "prompt": "abc"}
    while (answer := post(app.url, TEXT, body)).status_code != 200:
        assert answer.status_code == 503 and "retry-after" in answer.headers, answer.text
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert app.status()["pid"] != status["pid"]
    assert not psutil.pid_exists(int(status["rank_pid"]))


def test_streams_finish_and_the_end_comes_within_its_limit(app: LiveApp) -> None:
    """58, transformers PR#40479, as a stopping server does it."""
    from ray import serve

    from deployments.running_application import drain

    with ThreadPoolExecutor(3) as pool:
        short = [pool.submit(post, app.url, TEXT, {**SLOW, "max_tokens": 90}) for _ in range(2)]
        long = pool.submit(post, app.url, TEXT, {**SLOW, "max_tokens": 5000})
        until(lambda: app.status()["engine_running"] >= 3)
        began = time.monotonic()
        assert drain("cold", 4.0)
        assert time.monotonic() - began < 7
        for stream in short:
            received = events(stream.result().text)[:-1]
            assert "".join(chunk["choices"][0]["text"] for chunk in received) == "xyz" * 30
        cut = events(long.result().text)
        assert "error" in cut[-2] and cut[-1] == DONE
        refused = post(app.url, TEXT, {"model": "tiny", "prompt": "a"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
    serve.delete("cold")
    assert httpx.get(app.url + "/health").status_code == 404
    assert not drain("cold", 1.0)
