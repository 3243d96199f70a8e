"""What stands before every route of the gateway: key, deadline, limits, and the request log.

It is a layer around the whole application, not a part of routes: a route added later is closed.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from core.errors import CoterieError, RequestError
from deployments.access import OPEN_ROUTES, Access
from deployments.caller import NOBODY, Caller
from deployments.domain_weights import LABEL
from deployments.exchange import CURRENT, Exchange
from deployments.limits_client import LimitsClient
from deployments.openai_errors import envelope
from deployments.proxy_guard import SCOPE_BODY
from deployments.request_log import RequestLog
from deployments.settings import ServingSettings

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DEADLINE_HEADER = "x-coterie-deadline-ms"
DOMAIN_HEADER = "x-coterie-domain"
SESSION_HEADER = "x-session-id"
_MAX_SESSION_CHARS = 256
_MAX_DEADLINE_MS = 24 * 3600 * 1000
_SCOPE_CALLER = "coterie.caller"
_LOGGED_BODY_CHARS = 16 * 1024
_MAX_LABEL_CHARS = 256
_OPEN_METHODS = ("GET", "HEAD")
_POLICY_VIOLATION = 1008


def add_gate(api: FastAPI, serving: ServingSettings, access: Access, limits: LimitsClient) -> None:
    """Puts the gate before all routes of `api`, and CORS before it where origins are allowed."""
    folder = None if serving.request_log is None else Path(serving.request_log).expanduser()
    log = RequestLog(folder)
    api.add_middleware(
        RequestGate, access=access, limits=limits, log=log, log_bodies=serving.log_bodies
    )
    if serving.cors_origins:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=list(serving.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=[
                "authorization",
                "content-type",
                "x-api-key",
                DEADLINE_HEADER,
                DOMAIN_HEADER,
                SESSION_HEADER,
            ],
            expose_headers=["retry-after", "x-request-id"],
        )


def caller_of(request: Request) -> Caller:
    """What the gate found out about a request."""
    caller: Caller = request.scope.get(_SCOPE_CALLER, NOBODY)
    return caller


class RequestGate:
    """ASGI middleware."""

    def __init__(
        self, app: App, access: Access, limits: LimitsClient, log: RequestLog, log_bodies: bool
    ) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._log = log
        self._log_bodies = log_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] == "http":
            await self._exchange(scope, receive, send)
        elif scope["type"] == "lifespan" or not self._access.needs_key:
            await self._app(scope, receive, send)
        else:  # a websocket: there are none, and one that comes later is closed
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
        if path in OPEN_ROUTES and scope["method"] in _OPEN_METHODS:
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope["method"], path, _label(scope["headers"]))
        token = CURRENT.set(exchange)
        if self._log_bodies:
            receive = _body_reader(scope, receive, exchange)
        answer = _answer_watcher(send, exchange)
        try:
            try:
                caller = await self._admit(scope, exchange)
            except CoterieError as error:
                await _refuse(answer, error)
                return
            await self._app({**scope, _SCOPE_CALLER: caller}, receive, answer)
        except BaseException as error:
            exchange.failed(error)
            raise
        finally:
            CURRENT.reset(token)
            if exchange.lease is not None:
                exchange.lease.give_up()
            self._log.write(exchange.record())

    async def _admit(self, scope: Scope, exchange: Exchange) -> Caller:
        """Raises AccessError, RequestError, TenantLimitError or EngineUnavailableError."""
        exchange.tenant = tenant = self._access.tenant(scope["headers"])
        deadline_s = _deadline_s(scope["headers"])
        exchange.domain_hint = hint = _domain_hint(scope["headers"])
        session_id = _session_id(scope["headers"])
        if scope["method"] == "POST":
            exchange.lease = await self._limits.lease(tenant, self._access.allowance(tenant))
        return Caller(tenant, deadline_s, hint, session_id)


def _deadline_s(headers: list[tuple[bytes, bytes]]) -> float | None:
    """The moment that the header's milliseconds from now name. Raises RequestError."""
    for name, value in headers:
        if name.lower() == DEADLINE_HEADER.encode():
            text = value.decode("latin-1").strip()
            if not (text.isascii() and text.isdigit() and len(text) <= 9):
                text = "0"
            if not 1 <= int(text) <= _MAX_DEADLINE_MS:
                raise RequestError(
                    f"{DEADLINE_HEADER} must be whole milliseconds from 1 to {_MAX_DEADLINE_MS}, "
                    f"found {value[:40].decode('latin-1')!r}.",
                    DEADLINE_HEADER,
                )
            return time.time() + int(text) / 1000
    return None


def _domain_hint(headers: list[tuple[bytes, bytes]]) -> str:
    """Raises RequestError."""
    text = _only(headers, DOMAIN_HEADER)
    if text and not LABEL.fullmatch(text):
        raise RequestError(
            f"{DOMAIN_HEADER} must be one name of at most 64 of a-z, 0-9, _ and -, found "
            f"{text[:80]!r}.",
            DOMAIN_HEADER,
        )
    return text


def _session_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Raises RequestError."""
    text = _only(headers, SESSION_HEADER)
    if len(text) > _MAX_SESSION_CHARS or not (text.isascii() and text.isprintable()):
        raise RequestError(
            f"{SESSION_HEADER} must be one name of at most {_MAX_SESSION_CHARS} printable ASCII "
            f"characters, found {text[:40]!r} of {len(text)}.",
            SESSION_HEADER,
        )
    return text


def _only(headers: list[tuple[bytes, bytes]], wanted: str) -> str:
    """The header's text, "" where it is left out. Raises RequestError for different ones."""
    found = {value.strip() for name, value in headers if name.lower() == wanted.encode()}
    if len(found) > 1:
        raise RequestError(f"{wanted} must be sent once, found {len(found)} values.", wanted)
    return found.pop().decode("latin-1") if found else ""


def _label(headers: list[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        if name.lower() == b"x-request-id":
            return value.decode("ascii", "replace")[:_MAX_LABEL_CHARS]
    return None


def _answer_watcher(send: Send, exchange: Exchange) -> Send:
    """Notes status and error code; frees the tenant's place before the client sees the end."""

    async def watched(message: Event) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
        elif not message.get("more_body", False):
            if exchange.status >= 400 and exchange.error is None:
                exchange.error = _error_code(message.get("body", b""))
            if exchange.lease is not None:
                await exchange.lease.end()
        await send(message)

    return watched


def _error_code(body: bytes) -> str | None:
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["code"] or error["type"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


def _body_reader(scope: Scope, receive: Receive, exchange: Exchange) -> Receive:
    """Keeps the beginning of the body for the log."""
    whole = scope.get(SCOPE_BODY)
    if whole is not None:
        exchange.body = bytes(whole)[:_LOGGED_BODY_CHARS].decode("utf-8", "replace")
        return receive

    async def read() -> Event:
        message = await receive()
        if message["type"] == "http.request":
            part = message.get("body", b"")[:_LOGGED_BODY_CHARS].decode("utf-8", "replace")
            exchange.body = ((exchange.body or "") + part)[:_LOGGED_BODY_CHARS]
        return message

    return read


async def _refuse(send: Send, error: CoterieError) -> None:
    status, body, fields = envelope(error)
    data = msgspec.json.encode(body)
    fields = {"content-type": "application/json", "content-length": str(len(data)), **fields}
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
