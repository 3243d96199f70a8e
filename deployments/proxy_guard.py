"""What stands before Serve's HTTP proxy: headers that would change its behaviour, and large bodies.

The proxy obeys `x-request-disconnect-disabled` and `x-request-timeout-seconds` from any client,
decodes some header values without care, and buffers bodies without a limit. So a request meets
this middleware first, in the proxy's process (see `ray_environment.SERVE_ENVIRONMENT`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.middleware import Middleware

from core.errors import RequestError
from deployments.openai_errors import BodyTooLargeError, envelope
from deployments.ray_environment import MAX_BODY_VARIABLE
from deployments.settings import ServingSettings

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REFUSED_HEADERS = (b"x-request-disconnect-disabled", b"x-request-timeout-seconds")
_DROPPED_UNLESS_ASCII = (b"x-request-id", b"x-session-id", b"serve-multiplexed-model-id")
_MAX_REQUEST_ID_BYTES = 256
SCOPE_BODY = "coterie.body"
"""Scope entry with the whole body of a short request. The proxy hands the scope to the gateway
with the call; for the body the gateway would have to call back, which costs a millisecond."""
SCOPE_BODY_BYTES = 64 * 1024


def middlewares() -> list[Middleware]:
    """What Serve calls in each proxy."""
    default = ServingSettings.model_fields["max_body_bytes"].default
    return [Middleware(ProxyGuard, int(os.environ.get(MAX_BODY_VARIABLE, default)))]


def refused_header(headers: list[tuple[bytes, bytes]]) -> RequestError | None:
    """The error for a header that would switch cancellation off, None where there is none."""
    for name, _ in headers:
        if name.lower() in REFUSED_HEADERS:
            return RequestError(f"The header {name.decode('latin-1')} is not accepted here.")
    return None


def without_unsafe_values(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers whose values the proxy decodes, left out where that would fail."""
    return [(name, value) for name, value in headers if not _unsafe(name.lower(), value)]


def _unsafe(name: bytes, value: bytes) -> bool:
    """The proxy matches names with - and _ alike."""
    if name.replace(b"_", b"-") not in _DROPPED_UNLESS_ASCII:
        return not name.isascii()
    return not value.isascii() or len(value) > _MAX_REQUEST_ID_BYTES


class ProxyGuard:
    """ASGI middleware: refuses, cleans, and reads the body up to the limit."""

    def __init__(self, app: App, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = list(scope["headers"])
        if (refusal := refused_header(headers)) is not None:
            await _respond(send, refusal)
            return
        try:
            body = await self._read(headers, receive)
        except BodyTooLargeError as error:
            await _respond(send, error)
            return
        if body is None:
            return  # the client left before it had sent its request
        first: list[Event] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_rest() -> Event:
            return first.pop() if first else await receive()

        inner = {**scope, "headers": without_unsafe_values(headers)}
        if len(body) <= SCOPE_BODY_BYTES:
            inner[SCOPE_BODY] = body
        await self._app(inner, receive_rest, send)

    async def _read(self, headers: list[tuple[bytes, bytes]], receive: Receive) -> bytes | None:
        declared = dict(headers).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._limit:
            raise self._too_large(int(declared))
        parts = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._limit:
                raise self._too_large(size)
        return b"".join(parts)

    def _too_large(self, size: int) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"The body has {size} bytes or more; the limit is {self._limit} bytes."
        )


async def _respond(send: Send, error: Exception) -> None:
    status, body, headers = envelope(error)
    data = msgspec.json.encode(body)
    fields = {"content-type": "application/json", "content-length": str(len(data)), **headers}
    # What is left of the request on this connection is not read.
    fields["connection"] = "close"
    pairs = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})
