"""Whatever a client sends, the answer is no 5xx, the engine lives, and nothing stays behind.

Two sources: schemathesis on our own OpenAPI description, and seeded mutations of bodies that are
right, the recorded ones of public clients among them. 2,000 in `make test`, 10,000 in `make soak`.
"""

from __future__ import annotations

import collections
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis

from deployments.settings import ServingSettings
from tests.clients.run_client import model_with_tools
from tests.clients.test_recorded_bodies import ENGINE as DEMO_ENGINE
from tests.clients.test_recorded_bodies import RECORDED, UNKNOWN_MODEL
from tests.contract.mutations import mutated
from tests.serving.http_client import post
from tests.serving.local_server import MODEL, LocalServer
from tests.serving.tiny_model_folder import make_folder

FAKE, DEMO = "tests.serving.fake_engines:open_engine", "engine.engine:open_engine"
FAKE_ENGINE = {"max_sequences": 8, "context_tokens": 512, "kv_memory": 10_000}
# Mutations may leave out max_tokens; the demo model would then write until its context is full.
SERVING = ServingSettings(max_body_bytes="1MiB", default_max_tokens=16)
GAUGES = (
    "running",
    "waiting",
    "waiting_prompt_tokens",
    "engine_running",
    "engine_waiting",
    "kv_used",
)
EXAMPLES = 40
MOST_TOKENS = 24


def open_server(factory: str, folder: Path) -> LocalServer:
    if factory == DEMO:
        return LocalServer(model_with_tools(folder), SERVING, DEMO_ENGINE, DEMO)
    return LocalServer(make_folder(folder / "model"), SERVING, FAKE_ENGINE, FAKE)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    with open_server(request.param, tmp_path) as running:
        yield running


def right_bodies() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests that are answered, as short as they can be."""
    ask = [{"role": "user", "content": "abc"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    chat, text = "/v1/chat/completions", "/v1/completions"
    more = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["x"], "max_tokens": 4}
    found: list[tuple[str, dict[str, Any]]] = [
        (chat, {"messages": ask, **more}),
        (chat, {"messages": parts, "n": 2, "logprobs": True, "top_logprobs": 2, **more}),
        (
            chat,
            {"messages": ask, "stream": True, "stream_options": {"include_usage": True}, **more},
        ),
        (text, {"prompt": "abc", "logprobs": 1, "echo": True, **more}),
        (text, {"prompt": ["abc", "def"], "stream": True, "logit_bias": {"65": 1.0}, **more}),
        (text, {"prompt": [[65, 66], [67]], "min_tokens": 1, "stop_token_ids": [5], **more}),
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [65, 66]}),
    ]
    found = [(path, {"model": MODEL, **body}) for path, body in found]
    for file in sorted(RECORDED.glob("*.json")):
        for request in json.loads(file.read_text(encoding="utf-8"))["requests"]:
            body = dict(request["body"])
            if body["model"] != UNKNOWN_MODEL:
                short = {
                    name: min(body[name], MOST_TOKENS)
                    for name in ("max_tokens", "max_completion_tokens")
                    if name in body
                }
                found.append((request["path"], {**body, **short, "model": MODEL}))
    return found


def check_answer(answer: httpx.Response, sent: str) -> None:
    """4xx with an error object, or an answer; never a 5xx."""
    assert answer.status_code < 500, f"{answer.status_code} for {sent[:600]}: {answer.text[:600]}"
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, sent[:600]
        assert error["message"]


def check_alive(server: LocalServer) -> None:
    """A plain request is answered, and afterwards nothing is held."""
    body = {"model": MODEL, "prompt": "fine", "max_tokens": 2, "temperature": 0}
    answer = post(server.url, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    deadline = time.monotonic() + 10
    held: dict[str, float] = {}
    while time.monotonic() < deadline:
        status = server.status()
        held = {name: status[name] for name in GAUGES if status[name]}
        if not held:
            return
        time.sleep(0.05)
    raise AssertionError(f"something stayed behind: {held}")


def send_all(server: LocalServer, seed: int, count: int) -> collections.Counter[int]:
    statuses: collections.Counter[int] = collections.Counter()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for wrong in mutated(right_bodies(), seed, count):
            headers = {"content-type": wrong.content_type} if wrong.content_type else {}
            answer = client.post(wrong.path, content=wrong.content, headers=headers)
            check_answer(answer, f"{wrong.path} {wrong.content[:500]!r}")
            statuses[answer.status_code] += 1
    return statuses


@pytest.mark.parametrize(
    ("server", "count"), [(FAKE, 1700), (DEMO, 300)], indirect=["server"], ids=["fake", "demo"]
)
def test_mutated_bodies_are_answered_or_refused(server: LocalServer, count: int) -> None:
    statuses = send_all(server, 0, count)
    assert statuses[200] > count // 20, "some bodies must reach the engine"
    assert statuses[400] > count // 4
    check_alive(server)


@pytest.mark.parametrize("server", [DEMO], indirect=True, ids=["demo"])
@pytest.mark.parametrize("penalty", [1e-300, 1e-9, 0.01, 10.0])
def test_a_tiny_repetition_penalty_is_no_server_error(server: LocalServer, penalty: float) -> None:
    """Found by the mutations: logits divided by 1e-300 were not finite, which was a 500."""
    body = {"model": MODEL, "prompt": "The fox", "max_tokens": 4, "repetition_penalty": penalty}
    answer = post(server.url, "/v1/completions", body)
    assert answer.status_code == (200 if penalty >= 0.01 else 400), answer.text


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("server", "count"), [(FAKE, 8000), (DEMO, 2000)], indirect=["server"], ids=["fake", "demo"]
)
def test_many_mutated_bodies_are_answered_or_refused(server: LocalServer, count: int) -> None:
    send_all(server, random.SystemRandom().randrange(2**32), count)
    check_alive(server)


@pytest.mark.parametrize("server", [FAKE], indirect=True, ids=["fake"])
def test_our_own_description_breaks_nothing(server: LocalServer) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            answer = case.call(base_url=server.url, timeout=60)
            said = f"{case.method} {case.formatted_path} {case.body!r}"
            assert answer.status_code < 500, f"{answer.status_code} for {said[:600]}"

        ask()
    check_alive(server)
