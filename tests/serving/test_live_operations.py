"""Two gateways, limits of the service as a whole, and an operator at its Serve handles."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api_keys import digest_text
from deployments.tenant_limits import LEASE_S
from tests.serving import fake_engines
from tests.serving.conftest import FAKE_ENGINE, FAKE_SERVING, LiveApp, deploy
from tests.serving.http_client import DONE, events, post
from tests.waiting import until

pytestmark = pytest.mark.serve

TEXT = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "abc"}
SLOW: dict[str, Any] = {**BODY, "seed": fake_engines.SLOW_MS + 50}


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{tenant}"}


def write_keys(path: Path, **limits: str) -> None:
    lines = [
        f"  {name}:\n    keys: [{digest_text('key-of-' + name)}]\n    {limit}\n"
        for name, limit in limits.items()
    ]
    path.write_text("tenants:\n" + "".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_keys(path, free="", two="concurrency: 2", ten="requests_per_minute: 10")
    return path


@pytest.fixture(scope="module")
def app(live_serve: str, tiny_folder: Path, keys_file: Path) -> Iterator[LiveApp]:
    from ray import serve

    from deployments.application import application

    changes = {"gateways": 2, "keys_file": str(keys_file)}
    serving = FAKE_SERVING.model_copy(update=changes)
    factory = "tests.serving.fake_engines:open_engine"
    built = application("tiny", tiny_folder, serving, FAKE_ENGINE, {}, factory)
    yield deploy("two", live_serve, "tiny", built)
    serve.delete("two")


def gateways(app: LiveApp) -> list[int]:
    from app.commands.admin import ask_all

    return [int(status["pid"]) for status in ask_all(app.name, "Gateway", "status")]


def use(app: LiveApp, tenant: str) -> dict[str, int]:
    from app.commands.admin import ask_all

    (counts,) = ask_all(app.name, "Limits", "counts")
    return counts.get(tenant, {"requests": 0, "tokens": 0, "at_once": 0})


def test_limits_hold_for_two_gateways_together(app: LiveApp) -> None:
    assert len(set(gateways(app))) == 2
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda _: post(app.url, TEXT, BODY, headers=key("ten")), range(30)))
        codes = [answer.status_code for answer in answers]
        assert (codes.count(200), codes.count(429)) == (10, 20)
        slow = {**SLOW, "max_tokens": 30}
        answers = list(pool.map(lambda _: post(app.url, TEXT, slow, headers=key("two")), range(12)))
        codes = [answer.status_code for answer in answers]
        assert (codes.count(200), codes.count(429)) == (2, 10)
    # One after the other they all pass, whichever gateway each one meets.
    for _ in range(40):
        assert post(app.url, TEXT, BODY, headers=key("two")).status_code == 200
        streamed = post(app.url, TEXT, {**BODY, "stream": True}, headers=key("two"))
        assert events(streamed.text)[-1] == DONE
    assert use(app, "two")["at_once"] == 0


def test_only_the_listed_routes_are_open(app: LiveApp) -> None:
    """43, vllm#18892, through Serve's own proxy."""
    assert httpx.get(app.url + "/health").status_code == 200
    assert httpx.get(app.url + "/ready").status_code == 200
    for path in ("/v1/models", "/nope", "/", "/health/x"):
        assert httpx.get(app.url + path).status_code == 401, path
    answer = httpx.get(app.url + "/v1/models", headers=key("free") | {"x-request-id": "mine"})
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_an_operator_lists_and_ends_requests(app: LiveApp) -> None:
    from app.commands.admin import ask_all

    headers = {**key("free"), "x-request-id": "same"}
    slow = {**SLOW, "max_tokens": 100, "stream": True}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(post, app.url, TEXT, slow, headers=headers) for _ in range(2)]

        def both_listed() -> list[Any]:
            parts = ask_all(app.name, "Supervisor", "requests")
            listed = [one for part in parts for one in part]
            return listed if len(listed) == 2 else []

        listed = until(both_listed)
        time.sleep(0.5)
        assert any(ask_all(app.name, "Supervisor", "cancel", listed[0]["request_id"]))
        received = [events(answer.result().text) for answer in both]
    codes = [frames[-2].get("error", {}).get("code") for frames in received]
    assert sorted(map(str, codes)) == ["None", "cancelled_by_operator"]


def test_keys_are_reloaded_in_all_gateways(app: LiveApp, keys_file: Path) -> None:
    from app.commands.admin import ask_all

    assert post(app.url, TEXT, BODY, headers=key("new")).status_code == 401
    write_keys(keys_file, free="", two="concurrency: 2", new="")
    assert ask_all(app.name, "Gateway", "reload_keys") == [3, 3]
    for _ in range(10):
        assert post(app.url, TEXT, BODY, headers=key("new")).status_code == 200
    keys_file.write_text("tenants: {}\n", encoding="utf-8")
    assert all("holds no key" in said for said in ask_all(app.name, "Gateway", "reload_keys"))
    assert post(app.url, TEXT, BODY, headers=key("new")).status_code == 200
    assert post(app.url, TEXT, BODY, headers=key("ten")).status_code == 401


def test_what_a_dead_gateway_held_is_given_back(app: LiveApp) -> None:
    slow = {**SLOW, "max_tokens": 3000, "stream": True}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(post, app.url, TEXT, slow, headers=key("two"))
        until(lambda: use(app, "two")["at_once"] >= 2)
        assert post(app.url, TEXT, BODY, headers=key("two")).status_code == 429
        for pid in gateways(app):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LEASE_S + 30
    while use(app, "two")["at_once"]:
        assert time.monotonic() < deadline
        time.sleep(0.5)
