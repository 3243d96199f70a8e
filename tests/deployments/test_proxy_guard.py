from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from deployments.proxy_guard import SCOPE_BODY, ProxyGuard, middlewares

Events = list[dict[str, Any]]


def call(
    headers: list[tuple[bytes, bytes]], incoming: Events, limit: int = 10
) -> tuple[Events, dict[str, Any], bytes | None, int]:
    """(sent, scope seen by the application, body it read, incoming events left)."""
    seen: dict[str, Any] = {}
    bodies: list[bytes] = []
    sent: Events = []
    left = list(incoming)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "headers": headers}
    asyncio.run(ProxyGuard(application, limit)(scope, receive, send))
    return sent, seen, bodies[0] if bodies else None, len(left)


def part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def error_of(sent: Events) -> tuple[int, dict[str, Any]]:
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]


def test_a_body_arrives_whole_with_its_headers() -> None:
    headers = [(b"content-length", b"6"), (b"x-other", b"\xff"), (b"x-request-id", b"abc")]
    sent, scope, body, _ = call(headers, [part(b"abc", True), part(b"def", False)])
    assert (
        body == b"abcdef" == scope[SCOPE_BODY]
        and scope["headers"] == headers
        and sent[0]["status"] == 200
    )


@pytest.mark.parametrize("name", [b"x-request-disconnect-disabled", b"X-Request-Timeout-Seconds"])
def test_headers_that_steer_the_proxy_are_refused(name: bytes) -> None:
    sent, scope, _, left = call([(name, b"?1")], [part(b"", False)])
    status, error = error_of(sent)
    assert status == 400 and name.decode() in error["message"] and not scope and left == 1


@pytest.mark.parametrize("name", [b"x-request-id", b"serve-multiplexed-model-id", b"x_session_id"])
def test_values_that_the_proxy_could_not_decode_are_dropped(name: bytes) -> None:
    _, scope, _, _ = call([(name, b"\xff"), (b"accept", b"*/*")], [part(b"", False)])
    assert scope["headers"] == [(b"accept", b"*/*")]


def test_a_declared_length_above_the_limit_is_refused_unread() -> None:
    sent, scope, _, left = call([(b"content-length", b"11")], [part(b"x" * 11, False)])
    status, error = error_of(sent)
    assert (status, error["code"], left) == (413, "body_too_large", 1) and not scope
    assert (b"connection", b"close") in sent[0]["headers"]


def test_reading_stops_at_the_limit() -> None:
    sent, scope, _, left = call([], [part(b"x" * 6, True), part(b"x" * 6, True), part(b"", False)])
    assert error_of(sent)[0] == 413 and left == 1 and not scope


def test_a_client_that_leaves_while_sending_is_forgotten() -> None:
    sent, scope, _, _ = call([], [part(b"x", True), {"type": "http.disconnect"}])
    assert sent == [] and not scope


def test_the_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_PROXY_MAX_BODY_BYTES", "77")
    assert middlewares()[0].args == (77,)
