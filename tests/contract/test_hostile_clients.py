"""Bodies and connections that would hold the service up, or that clients of all kinds may send.

Found by trying to break a running service; each test is named after what is right.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from app.commands.chat import readable
from deployments.openai_schema import (
    _KEPT_KEYS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    parse_body,
)
from deployments.settings import ServingSettings
from tests.contract.test_mutated_bodies import GAUGES, check_alive
from tests.serving.fake_engines import SLOW_MS
from tests.serving.http_client import DONE, events, post
from tests.serving.local_server import MODEL, LocalServer
from tests.serving.tiny_model_folder import make_folder
from tests.waiting import until

ENGINE = {"max_sequences": 4, "context_tokens": 512, "kv_memory": 10_000}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "abc"}]
UNKNOWN = {f"k{number}": 1 for number in range(100_000)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    serving = ServingSettings(max_body_bytes="8MiB")
    with LocalServer(make_folder(tmp_path / "model"), serving, ENGINE) as running:
        yield running


MANY_FAULTS: list[tuple[type[Any], dict[str, Any], str, str]] = [
    (CompletionRequest, {"model": "m", "prompt": "a", **UNKNOWN}, "k0", "k0, k1, k2, k3, k4"),
    (ChatRequest, {"model": "m", "messages": [{**ASK[0], **UNKNOWN}]}, "messages", "messages.0.k0"),
    (
        ChatRequest,
        {"model": "m", "messages": ASK, "logit_bias": dict.fromkeys(UNKNOWN, "x")},
        "logit_bias",
        "logit_bias.k0",
    ),
    (DetokenizeRequest, {"tokens": [1] * 1000 + [-1] * 500_000}, "tokens", "tokens.1000"),
    (
        ChatRequest,
        {"model": "m", "messages": [{**ASK[0], **dict(list(UNKNOWN.items())[:9])}] * 4000},
        "messages",
        "messages.0.k0",
    ),
]


@pytest.mark.parametrize(("model", "body", "param", "named"), MANY_FAULTS)
def test_a_body_of_a_hundred_thousand_faults_is_refused_by_the_first(
    model: type[Any], body: dict[str, Any], param: str, named: str
) -> None:
    """To list them all took 27 s for 8 MB, in which nothing else of the gateway ran."""
    content = json.dumps(body).encode()
    began = time.monotonic()
    with pytest.raises(Exception, match=named) as found:
        parse_body(model, content)
    took_s = time.monotonic() - began
    assert type(found.value).__name__ == "RequestError"
    assert found.value.param == param  # type: ignore[attr-defined]
    assert len(str(found.value)) < 600
    began = time.monotonic()
    json.loads(content)
    assert took_s < max(1.0, 40 * (time.monotonic() - began))


def test_faults_behind_the_beginning_of_a_body_are_refused_too() -> None:
    bias: dict[str, Any] = dict.fromkeys(map(str, range(_KEPT_KEYS)), 1.0)
    bias |= dict.fromkeys(map(str, range(1000, 1800)), "x")
    body = {"model": "m", "messages": ASK, "logit_bias": bias}
    with pytest.raises(Exception, match="800 values of a wrong kind"):
        parse_body(ChatRequest, json.dumps(body).encode())


def test_no_object_of_a_body_has_more_fields_than_are_kept() -> None:
    assert max(len(model.model_fields) for model in (ChatRequest, CompletionRequest)) < _KEPT_KEYS


def test_an_error_does_not_give_a_huge_name_back(server: LocalServer) -> None:
    answer = post(server.url, TEXT, {"model": MODEL, "prompt": "a", "k" * 1_000_000: 1})
    assert answer.status_code == 400
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "abc de " * 300_000}),
        (TEXT, {"prompt": ["fine", "a" * 2_000_000]}),
        (CHAT, {"messages": [{"role": "user", "content": "abc de " * 300_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "abc de " * 500}] * 600}),
        ("/tokenize", {"prompt": "abc de " * 300_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "abc de " * 300_000}]}),
    ],
)
def test_a_text_far_longer_than_the_context_is_not_tokenised_whole(
    server: LocalServer, path: str, body: dict[str, Any]
) -> None:
    """7 MB cost a minute of one of two threads and a gigabyte, to be refused in the end."""
    lengths: list[int] = []
    worker = server.model.tokenizer
    whole = worker._tokenizer

    class Watched:
        def encode_batch(self, texts: list[str], **names: Any) -> Any:
            lengths.extend(map(len, texts))
            return whole.encode_batch(texts, **names)

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

    worker._tokenizer = Watched()  # type: ignore[assignment]
    limit = {} if path == "/tokenize" else {"max_tokens": 2}
    answer = post(server.url, path, {"model": MODEL, **limit, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("prompt" if "prompt" in body else "messages")
    for word in ("tokens", "max_tokens is 2" if limit else "limit", "512"):
        assert word in error["message"]
    assert max(lengths) <= 16 * 512
    check_alive(server)


def test_a_long_text_that_fits_by_tokens_is_answered(tmp_path: Path) -> None:
    """The beginning alone never refuses a prompt: it must hold more tokens than the context."""
    engine = {**ENGINE, "context_tokens": 80_000, "kv_memory": 100_000}
    with LocalServer(make_folder(tmp_path / "model"), ServingSettings(), engine) as server:
        body = {"model": MODEL, "prompt": "ab" * 35_000, "max_tokens": 2}
        answer = post(server.url, TEXT, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 70_000


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/v1/models", f"/v1/models/{MODEL}", "/docs"]
)
def test_whoever_may_get_may_also_ask_for_the_head(server: LocalServer, path: str) -> None:
    """Load balancers watch /health so."""
    answer = httpx.head(server.url + path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", [TEXT + "/", CHAT + "/", "/health/", "/tokenize/"])
def test_a_trailing_slash_is_no_redirect(server: LocalServer, path: str) -> None:
    """A redirect names http and the Host header's name: a key would follow it there."""
    answer = post(server.url, path, {"model": MODEL, "prompt": "abc"})
    assert answer.status_code == 404
    assert "location" not in answer.headers
    assert answer.json()["error"]["code"] == "unknown_url"


def test_a_client_that_leaves_within_its_body_is_no_fault_of_the_server(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")  # commands that call Ray make it less talkative
    parts = urlsplit(server.url)
    assert parts.hostname is not None and parts.port is not None
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(head.encode() + b'{"model": ')
        time.sleep(0.2)
    check_alive(server)
    until(lambda: any('"status":499' in record.getMessage() for record in caplog.records))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("more", "most"), [({}, 9), ({"n": 3}, 5), ({"service_tier": "flex"}, 7)], ids=str
)
def test_a_list_that_can_never_be_taken_whole_is_not_told_to_come_back(
    tmp_path: Path, more: dict[str, Any], most: int
) -> None:
    """It got 503 with Retry-After for ever: each of its prompts is a request in the queue."""
    serving = ServingSettings(max_queued_requests=3)
    with LocalServer(make_folder(tmp_path / "model"), serving, ENGINE) as server:
        body = {"model": MODEL, "max_tokens": 2, "seed": SLOW_MS + 10, **more}
        answer = post(server.url, TEXT, {**body, "prompt": ["abc"] * most})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == most * more.get("n", 1)
        answer = post(server.url, TEXT, {**body, "prompt": ["abc"] * (most + 1)})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        assert f"at most {most} prompts" in answer.json()["error"]["message"]
        check_alive(server)


def test_piped_bytes_that_are_no_text_are_replaced() -> None:
    """`coterie chat` told of a template that refused them."""
    typed = b"a\xff\xe5 b".decode("utf-8", "surrogateescape")
    assert readable(typed) == "a\ufffd\ufffd b"
    assert readable("na\u00efve \U0001f600") == "na\u00efve \U0001f600"


def test_what_a_drain_ends_ends_in_the_engine_too(server: LocalServer) -> None:
    """Streams got their error frame; their sequences went on to max_tokens for nobody."""
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 400, "seed": SLOW_MS + 50}
    stream = {**body, "stream": True}
    with httpx.stream("POST", server.url + TEXT, json=stream, timeout=30) as answer:
        lines = answer.iter_text()
        first = next(lines)
        server.call(server.supervisor.drain(0.1))
        found = events(first + "".join(lines))
    assert found[-1] == DONE and found[-2]["error"]["code"] == "engine_unavailable"
    deadline = time.monotonic() + 3
    while any(server.status()[name] for name in GAUGES) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {name: server.status()[name] for name in GAUGES} == dict.fromkeys(GAUGES, 0)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_nobody_goes_on_with_tokens_for_a_client_that_left(server: LocalServer, path: str) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def slow(body: bytes) -> dict[str, Any]:
        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        return {}

    setattr(server.gateway, path[1:], slow)
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "content-length: 2\r\n\r\n{}".encode()
        )
        assert begun.wait(10)
    assert ended.wait(10)
