"""The orderly end of an application, on one of its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving import fake_engines
from tests.serving.conftest import FAKE_ENGINE, FAKE_SERVING, deploy
from tests.serving.http_client import DONE, events, post

pytestmark = pytest.mark.serve

TEXT = "/v1/completions"


def test_streams_finish_and_the_end_comes_within_its_limit(
    live_serve: str, tiny_folder: Path
) -> None:
    """58, transformers PR#40479, as a stopping server does it."""
    from ray import serve

    from deployments.application import application
    from deployments.drain import drain

    factory = "tests.serving.fake_engines:open_engine"
    built = application("tiny", tiny_folder, FAKE_SERVING, FAKE_ENGINE, {}, factory)
    app = deploy("ending", live_serve, "tiny", built)
    body = {"model": "tiny", "prompt": "xyz", "stream": True, "seed": fake_engines.SLOW_MS + 20}
    with ThreadPoolExecutor(3) as pool:
        short = [pool.submit(post, app.url, TEXT, {**body, "max_tokens": 90}) for _ in range(2)]
        long = pool.submit(post, app.url, TEXT, {**body, "max_tokens": 5000})
        while app.status()["engine_running"] < 3:
            time.sleep(0.05)
        began = time.monotonic()
        assert drain("ending", 4.0)
        assert time.monotonic() - began < 7
        for stream in short:
            received = events(stream.result().text)[:-1]
            assert "".join(chunk["choices"][0]["text"] for chunk in received) == "xyz" * 30
        cut = events(long.result().text)
        assert "error" in cut[-2] and cut[-1] == DONE
        refused = post(app.url, TEXT, {"model": "tiny", "prompt": "a"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
    serve.delete("ending")
    assert httpx.get(app.url + "/health").status_code == 404
    assert not drain("ending", 1.0)
