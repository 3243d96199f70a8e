"""Gateway, supervisor and rank as Serve runs them, over real HTTP with the official client."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import MAX_BODY_BYTES
from tests.serving import fake_engines
from tests.serving.conftest import LiveApp
from tests.serving.http_client import DONE, events, leave_after, post
from tests.waiting import until

pytestmark = pytest.mark.serve

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GAUGES = ("running", "waiting", "waiting_prompt_tokens", "engine_running", "kv_used")


@pytest.fixture(scope="module")
def client(fake_app: LiveApp) -> openai.OpenAI:
    return openai.OpenAI(base_url=fake_app.url + "/v1", api_key="none", max_retries=0, timeout=60)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def slow_body(ms: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    seed = fake_engines.SLOW_MS + ms
    return {
        "model": "tiny",
        "prompt": "ab" * 20,
        "seed": seed,
        "max_tokens": max_tokens,
        **fields,
    }


def until_idle(app: LiveApp) -> None:
    until(lambda: all(app.status()[name] == 0 for name in GAUGES))
    until(lambda: app.gateway_status()["open_requests"] == 0)


def test_neither_gateway_nor_supervisor_imports_torch(fake_app: LiveApp) -> None:
    assert post(fake_app.url, TEXT, {"model": "tiny", "prompt": "abc"}).status_code == 200
    status, gateway = fake_app.status(), fake_app.gateway_status()
    assert status["torch_imported"] == 0 and gateway["torch_imported"] == 0
    assert len({status["pid"], status["rank_pid"], gateway["pid"], os.getpid()}) == 4


def test_the_official_client_gets_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=user("Hello 世界"), n=2, stop=["界"], logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello 世"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    assert client.completions.create(model="tiny", prompt="the DEF").choices[0].text == "the DEF"
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "coterie"


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=user("Hello 世界"),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for x in chunks for choice in x.choices)
    assert text == "Hello 世界"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    parts = client.completions.create(model="tiny", prompt="the DEF", stream=True)
    assert "".join(part.choices[0].text for part in parts) == "the DEF"


def test_the_official_client_sees_our_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="max_tokens is 1000000000"):
        client.completions.create(model="tiny", prompt="a", max_tokens=10**9)
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        client.completions.create(model="tiny", prompt="a", extra_body={"frobnicate": 1})
    seed = fake_engines.RAISE_AT_TOKEN_3
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.completions.create(model="tiny", prompt="abcdef", seed=seed, stream=True))


def test_alive_and_ready(fake_app: LiveApp) -> None:
    assert httpx.get(fake_app.url + "/health").json() == {"status": "alive"}
    ready = httpx.get(fake_app.url + "/ready")
    assert ready.status_code == 200 and ready.json()["ready_replicas"] == 1
    missing = httpx.get(fake_app.url + "/nope")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "unknown_url"


def test_the_proxy_obeys_no_header_of_a_client(fake_app: LiveApp) -> None:
    body = {"model": "tiny", "prompt": "abc"}
    for name in ("x-request-disconnect-disabled", "X-Request-Timeout-Seconds"):
        response = post(fake_app.url, TEXT, body, headers={name: "?1"})
        assert response.status_code == 400 and name.lower() in response.json()["error"]["message"]
    for name in ("x-request-id", "x-session-id", "serve_multiplexed_model_id"):
        response = post(fake_app.url, TEXT, body, headers={name: b"\xff"})
        assert response.status_code == 200, (name, response.text)


@pytest.mark.parametrize("chunked", [False, True])
def test_the_proxy_stops_reading_a_large_body(fake_app: LiveApp, chunked: bool) -> None:
    sent = []

    def parts() -> Any:
        for _ in range(200):
            sent.append(65536)
            yield b" " * 65536

    content = parts() if chunked else b" " * (200 * 65536)
    try:
        response = httpx.post(fake_app.url + TEXT, content=content, timeout=30)
    except (httpx.WriteError, httpx.ReadError):
        pass  # the server closed while we were still sending
    else:
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
    assert sum(sent) < 40 * MAX_BODY_BYTES
    assert post(fake_app.url, TEXT, {"model": "tiny", "prompt": "abc"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(fake_app: LiveApp, stream: bool) -> None:
    before = fake_app.status()["aborted"]
    body = slow_body(20, 4000, stream=stream)
    leave_after(fake_app.url, TEXT, body, b"data:" if stream else None, linger_s=0.5)
    until(lambda: fake_app.status()["aborted"] == before + 1)
    until_idle(fake_app)


def test_a_cancel_storm_leaves_nothing_behind(fake_app: LiveApp) -> None:
    body = slow_body(5, 4000, stream=True)
    with ThreadPoolExecutor(30) as pool:
        list(pool.map(lambda _: leave_after(fake_app.url, TEXT, body, None), range(120)))
    assert post(fake_app.url, TEXT, {"model": "tiny", "prompt": "abc"}).status_code == 200
    until_idle(fake_app)


def _streams(app: LiveApp, count: int, body: dict[str, Any]) -> list[threading.Thread]:
    received: list[list[Any]] = []
    threads = [
        threading.Thread(target=lambda: received.append(events(post(app.url, TEXT, body).text)))
        for _ in range(count)
    ]
    for thread in threads:
        thread.received = received  # type: ignore[attr-defined]
        thread.start()
    return threads


def test_a_killed_rank_is_remade_inside_the_living_replica(fake_app: LiveApp) -> None:
    before = fake_app.status()
    threads = _streams(fake_app, 5, slow_body(20, 4000, stream=True))
    until(lambda: fake_app.status()["engine_running"] == 5)
    os.kill(int(before["rank_pid"]), signal.SIGKILL)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for received in threads[0].received:  # type: ignore[attr-defined]
        assert received[-1] == DONE and received.count(DONE) == 1
        failures = [event for event in received[:-1] if "error" in event]
        assert len(failures) == 1 and failures[0] is received[-2]
        assert failures[0]["error"]["code"] == "engine_unavailable"
    # Alive at once, not ready until the new rank has run a step, and then serving.
    assert httpx.get(fake_app.url + "/health").status_code == 200
    answer = post(fake_app.url, TEXT, {"model": "tiny", "prompt": "abc"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "abc"
    after = fake_app.status()
    assert after["pid"] == before["pid"] and after["rank_pid"] != before["rank_pid"]
    assert after["remakes"] == before["remakes"] + 1
    until_idle(fake_app)


@pytest.mark.parametrize("seed", [fake_engines.CRASH, fake_engines.HANG, fake_engines.STEP_RAISES])
def test_a_rank_that_crashes_or_hangs_is_remade(fake_app: LiveApp, seed: int) -> None:
    before = fake_app.status()
    body = {"model": "tiny", "prompt": "abcdef", "seed": seed, "stream": True}
    received = events(post(fake_app.url, TEXT, body).text)
    assert "error" in received[-2] and received[-1] == DONE
    ready = httpx.get(fake_app.url + "/ready")
    assert ready.status_code in (200, 503)
    assert post(fake_app.url, TEXT, {"model": "tiny", "prompt": "abc"}).status_code == 200
    after = fake_app.status()
    assert after["pid"] == before["pid"] and after["rank_pid"] != before["rank_pid"]


def test_nothing_listens_beyond_loopback(fake_app: LiveApp) -> None:
    import psutil

    port = httpx.URL(fake_app.url).port
    listening = {
        connection.laddr.ip
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    assert listening == {"127.0.0.1"}
