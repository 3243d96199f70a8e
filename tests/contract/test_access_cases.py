"""Keys, limits, deadlines and the request log over real HTTP; numbers are rows of our list."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from deployments.access import OPEN_ROUTES
from deployments.api_keys import digest_text
from deployments.http_api import make_http_api
from deployments.request_log import RequestLog
from deployments.settings import ServingSettings
from tests.serving import fake_engines
from tests.serving.http_client import DONE, events, post
from tests.serving.local_server import MODEL, LocalServer
from tests.serving.tiny_model_folder import make_folder
from tests.waiting import until

TEXT = "/v1/completions"
ENGINE = {"max_sequences": 2, "context_tokens": 4096, "kv_memory": 10_000}
SLOW = fake_engines.SLOW_MS + 20
KEY = {"authorization": "Bearer key-of-acme"}
OTHER = {"x-api-key": "key-of-other"}
FEW = {"authorization": "Bearer key-of-few"}
WORDY = {"authorization": "Bearer key-of-wordy"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def server(
    folder: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    limits = {
        "acme": "",
        "other": "concurrency: 1",
        "few": "requests_per_minute: 3",
        "wordy": "tokens_per_minute: 40",
    }
    lines = [
        f"  {name}:\n    keys: [{digest_text('key-of-' + name)}]\n    {limit}\n"
        for name, limit in limits.items()
    ]
    keys.write_text("tenants:\n" + "".join(lines), encoding="utf-8")
    serving = ServingSettings(
        keys_file=str(keys), request_log=str(logs), cors_origins=("https://a.example",)
    )
    with LocalServer(folder, serving, ENGINE) as running:
        running.keys = keys  # type: ignore[attr-defined]
        yield running


def body(prompt: str = "abc", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


# Keys


def test_every_route_but_the_listed_ones_needs_a_key(server: LocalServer) -> None:
    """43, vllm#18892: also routes that are added later, and ones that do not exist."""
    api = make_http_api(server.gateway)

    @api.get("/added/later")
    async def later() -> str:
        return "open"

    routes = [(r.path, m) for r in api.routes if isinstance(r, APIRoute) for m in r.methods]
    routes += [(r.path, "GET") for r in api.routes if not isinstance(r, APIRoute)]  # type: ignore[attr-defined]
    assert len(routes) >= 9 and ("/v1/chat/completions", "POST") in routes

    async def ask(path: str, method: str, headers: dict[str, str]) -> httpx.Response:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, headers=headers)

    for path, method in [*routes, ("/nope", "GET"), ("/health", "POST"), ("/health/", "GET")]:
        url = path.replace("{name:path}", "m")
        answer = server.call(ask(url, method, {}))
        if path in OPEN_ROUTES and method in ("GET", "HEAD"):
            assert answer.status_code == 200, path
            continue
        assert answer.status_code == 401, path
        if method == "HEAD":
            continue  # an answer without a body
        assert code(answer) == "invalid_api_key", path
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert server.call(ask("/added/later", "GET", KEY)).json() == "open"
    assert {"/health", "/ready"} == OPEN_ROUTES


def test_a_websocket_is_closed_without_a_key(server: LocalServer) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    api = make_http_api(server.gateway)

    async def run() -> None:
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "root_path": ""}
        await api(scope, None, send)  # type: ignore[arg-type]

    server.call(run())
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_official_clients_enter_with_their_key_and_see_why_not_without(server: LocalServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="key-of-acme", max_retries=0)
    assert client.completions.create(model=MODEL, prompt="abc").choices[0].text == "abc"
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"


def test_tenants_do_not_share_cached_prompts(server: LocalServer) -> None:
    seen = []
    generate = server.supervisor.generate

    def watched(payload: bytes) -> Any:
        import msgspec

        from deployments.text_delta import Generation

        seen.append(msgspec.msgpack.decode(payload, type=Generation).request.tenant)
        return generate(payload)

    server.supervisor.generate = watched  # type: ignore[method-assign]
    try:
        for headers in (KEY, OTHER):
            assert post(server.url, TEXT, body(), headers=headers).status_code == 200
    finally:
        del server.supervisor.generate
    assert seen == ["acme", "other"]


def test_keys_can_be_changed_while_serving(server: LocalServer) -> None:
    path: Path = server.keys  # type: ignore[attr-defined]
    before = path.read_text(encoding="utf-8")
    new = {"authorization": "Bearer brand-new"}
    assert post(server.url, TEXT, body(), headers=new).status_code == 401
    path.write_text(before + f"  late: {{keys: [{digest_text('brand-new')}]}}\n", encoding="utf-8")
    assert server.gateway.access.reload() == 5
    assert post(server.url, TEXT, body(), headers=new).status_code == 200
    path.write_text(before, encoding="utf-8")
    assert server.gateway.access.reload() == 4
    assert post(server.url, TEXT, body(), headers=new).status_code == 401


def test_web_pages_of_allowed_origins_may_ask(server: LocalServer, folder: Path) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    preflight = httpx.options(server.url + TEXT, headers=asked)
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    answer = post(server.url, TEXT, body(), headers={**KEY, "origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    answer = post(server.url, TEXT, body(), headers={**KEY, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in answer.headers


# Limits


def limited(answer: httpx.Response) -> float:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    return float(answer.headers["retry-after"])


def test_requests_a_minute(server: LocalServer) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="key-of-few", max_retries=0)
    for _ in range(3):
        client.completions.create(model=MODEL, prompt="abc")
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model=MODEL, prompt="abc")
    assert refused.value.code == "rate_limit_exceeded"
    assert 50 <= limited(post(server.url, TEXT, body(), headers=FEW)) <= 61
    assert post(server.url, TEXT, body(), headers=KEY).status_code == 200
    assert client.models.list(), "reading costs nothing"


def test_requests_at_once_and_one_after_the_other(server: LocalServer) -> None:
    for _ in range(30):
        assert post(server.url, TEXT, body(), headers=OTHER).status_code == 200
        streamed = post(server.url, TEXT, body(stream=True), headers=OTHER)
        assert events(streamed.text)[-1] == DONE
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, server.url, TEXT, body(seed=SLOW, max_tokens=40), headers=OTHER)
        until(lambda: server.status()["engine_running"])
        limited(post(server.url, TEXT, body(), headers=OTHER))
        assert slow.result().status_code == 200
    assert post(server.url, TEXT, body(), headers=OTHER).status_code == 200
    # One request with several prompts or choices is one request.
    many = body(n=2) | {"prompt": ["abc", "def"]}
    assert post(server.url, TEXT, many, headers=OTHER).status_code == 200


def test_tokens_that_were_generated_count(server: LocalServer) -> None:
    long = body("abcdefghij", max_tokens=35, ignore_eos=True)
    assert post(server.url, TEXT, long, headers=WORDY).status_code == 200
    limited(post(server.url, TEXT, body("a"), headers=WORDY))
    counts = server.call(server.gateway.limits.counts())["wordy"]
    assert counts["tokens"] == 45 and counts["at_once"] == 0


def test_a_full_service_is_503_and_a_full_tenant_is_429(folder: Path, tmp_path: Path) -> None:
    """69, ray#51145."""
    keys = tmp_path / "keys.yaml"
    entries = f"one: {{keys: [{digest_text('key-of-one')}], concurrency: 1}}"
    entries += f"\n  big: {{keys: [{digest_text('key-of-big')}]}}"
    keys.write_text(f"tenants:\n  {entries}\n", encoding="utf-8")
    one, big = ({"x-api-key": f"key-of-{name}"} for name in ("one", "big"))
    serving = ServingSettings(max_queued_requests=1, keys_file=str(keys))
    engine = {**ENGINE, "max_sequences": 1}
    slow = body(seed=SLOW, max_tokens=4000, stream=True)
    with LocalServer(folder, serving, engine) as small, ThreadPoolExecutor(4) as pool:

        def held() -> float:
            status = small.status()
            return status["running"] + status["waiting"]

        # The rank takes three, one waits, and that is all.
        for count, headers in enumerate((one, big, big, big), start=1):
            pool.submit(post, small.url, TEXT, slow, headers=headers)
            until(lambda least=count: held() >= least)
        limited(post(small.url, TEXT, body(), headers=one))
        for _ in range(5):
            full = post(small.url, TEXT, body(), headers=big)
            assert (full.status_code, code(full)) == (503, "overloaded")
            assert int(full.headers["retry-after"]) >= 1
        for entry in small.call(small.supervisor.requests()):
            small.call(small.supervisor.cancel(str(entry["request_id"])))
    assert small.gateway.status()["open_requests"] == 0


# Deadlines and priorities


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "99999999999", "\u00b2"])
def test_a_deadline_that_is_none_is_refused(server: LocalServer, value: str) -> None:
    headers = {**KEY, "x-coterie-deadline-ms": value.encode("utf-8")}
    content = json.dumps(body()).encode()
    answer = httpx.post(server.url + TEXT, content=content, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-coterie-deadline-ms"


def test_a_deadline_ends_a_request_and_frees_its_place(server: LocalServer) -> None:
    headers = {**KEY, "x-coterie-deadline-ms": "200"}
    slow = body(seed=SLOW, max_tokens=2000)
    began = time.monotonic()
    answer = post(server.url, TEXT, slow, headers=headers)
    assert (answer.status_code, code(answer)) == (408, "deadline_exceeded")
    assert time.monotonic() - began < 1.5
    cut = events(post(server.url, TEXT, {**slow, "stream": True}, headers=headers).text)
    assert cut[-2]["error"]["code"] == "deadline_exceeded" and cut[-1] == DONE
    time.sleep(0.2)
    status = server.status()
    assert (status["engine_running"], status["running"], status["kv_used"]) == (0, 0, 0)
    quick = {**KEY, "x-coterie-deadline-ms": "5000"}
    assert post(server.url, TEXT, body(), headers=quick).status_code == 200


def test_interactive_requests_pass_those_of_the_flex_tier(folder: Path) -> None:
    order: list[str] = []
    engine = {**ENGINE, "max_sequences": 1}
    with LocalServer(folder, ServingSettings(), engine) as one, ThreadPoolExecutor(9) as pool:

        def ask(tier: str, tokens: int = 5) -> None:
            slow = body(seed=SLOW, max_tokens=tokens, service_tier=tier)
            assert post(one.url, TEXT, slow).status_code == 200
            order.append(tier)

        first = [pool.submit(ask, "auto", 100) for _ in range(4)]
        until(lambda: one.status()["running"] >= 3)
        rest = [pool.submit(ask, "flex") for _ in range(2)]
        until(lambda: one.status()["waiting"] >= 2)
        rest += [pool.submit(ask, "default") for _ in range(2)]
        for job in first + rest:
            job.result()
    assert order[-2:] == ["flex", "flex"]


# Operators


def test_an_operator_ends_a_request_by_its_id_not_by_a_label(server: LocalServer) -> None:
    """40: what a client sends as x-request-id is a label, and two may send the same."""
    headers = {**KEY, "x-request-id": "same"}
    with ThreadPoolExecutor(2) as pool:
        slow = body(seed=SLOW, max_tokens=200, stream=True)
        both = [pool.submit(post, server.url, TEXT, slow, headers=headers) for _ in range(2)]
        until(lambda: len(server.call(server.supervisor.requests())) == 2)
        listed = server.call(server.supervisor.requests())
        assert {entry["tenant"] for entry in listed} == {"acme"}
        time.sleep(0.3)  # until both have sent text: before that, the answer is a 403
        assert not server.call(server.supervisor.cancel("same"))
        assert server.call(server.supervisor.cancel(str(listed[0]["request_id"])))
        received = [events(answer.result().text) for answer in both]
    ended = [frames for frames in received if "error" in frames[-2]]
    assert len(ended) == 1 and ended[0][-2]["error"]["code"] == "cancelled_by_operator"
    assert server.call(server.supervisor.requests()) == []


def test_the_log_has_a_line_a_request_and_nobodys_text(server: LocalServer, logs: Path) -> None:
    secret = "pineapple"
    headers = {**KEY, "x-request-id": "label-7"}
    post(server.url, TEXT, body(secret, stream=True), headers=headers)
    post(server.url, TEXT, body(secret, n=0), headers=headers)
    post(server.url, TEXT, body(secret), headers={"authorization": "Bearer wrong-key"})
    time.sleep(0.1)
    (file,) = logs.glob("requests-*.jsonl")
    text = file.read_text(encoding="utf-8")
    assert secret not in text and "key-of" not in text and "wrong-key" not in text
    fine, bad, stranger = [json.loads(line) for line in text.splitlines()][-3:]
    assert (fine["status"], fine["tenant"], fine["label"]) == (200, "acme", "label-7")
    assert (fine["prompt_tokens"], fine["finish_reasons"]) == (9, ["stop"])
    assert fine["completion_tokens"] >= 9 and fine["ttft_ms"] > 0 and fine["request_ids"]
    assert (bad["status"], bad["tenant"]) == (400, "acme") and bad["error"]
    assert (stranger["status"], stranger["error"]) == (401, "invalid_api_key")
    assert "tenant" not in stranger


def test_the_log_has_bodies_when_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    serving = ServingSettings(request_log=str(tmp_path), log_bodies=True)
    with LocalServer(folder, serving, ENGINE) as server:
        post(server.url, TEXT, body("pineapple"))
        time.sleep(0.1)
    (file,) = tmp_path.glob("requests-*.jsonl")
    (line,) = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert json.loads(line["body"])["prompt"] == "pineapple"


def test_log_files_are_their_owners_and_those_of_the_long_dead_go(tmp_path: Path) -> None:
    dead = 2**22 + 1
    for age in range(12):
        for suffix in ("", ".1"):
            path = tmp_path / f"requests-{dead + age}.jsonl{suffix}"
            path.write_text("old")
            os.utime(path, (10_000 - age, 10_000 - age))
    mine = tmp_path / f"requests-{os.getpid()}.jsonl"
    mine.write_text("")
    living = tmp_path / f"requests-{os.getppid()}.jsonl"
    other = tmp_path / "requests-of-mine.jsonl"
    for path in (living, other):
        path.write_text("keep")
        os.utime(path, (1, 1))
    RequestLog(tmp_path).write({"label": "世"})
    assert mine.stat().st_mode & 0o777 == 0o600
    assert json.loads(mine.read_bytes().decode("utf-8")) == {"label": "世"}
    left = {path.name for path in tmp_path.iterdir()} - {mine.name, living.name, other.name}
    assert living.exists() and other.exists()
    names = [f"requests-{dead + age}.jsonl" for age in range(8)]
    assert left == {*names, *(f"{name}.1" for name in names)}
