"""The routes of the gateway: HTTP in, OpenAI's shapes and errors out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from importlib import metadata
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.errors import CoterieError
from deployments.answering import EventStream
from deployments.gateway import Gateway
from deployments.metrics_page import CONTENT_TYPE as METRICS_TYPE
from deployments.openai_errors import (
    HTTP_CODES,
    BodyTooLargeError,
    ErrorKind,
    envelope,
    error_object,
)
from deployments.openapi_page import openapi, page
from deployments.proxy_guard import SCOPE_BODY, refused_header
from deployments.request_gate import add_gate, caller_of

log = logging.getLogger("ray.serve")

_CLIENT_GONE = 499
_READ = ["GET", "HEAD"]
_PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
Result = TypeVar("Result")


def make_http_api(gateway: Gateway) -> FastAPI:
    """The ASGI application over one gateway."""
    api = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would name http, whatever stands before this server, and take the key there.
        redirect_slashes=False,
        telemetry={"auto_configure": False},
    )

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _body(request, gateway)
        return await _while_connected(request, gateway.chat(body, caller_of(request)))

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _body(request, gateway)
        return await _while_connected(request, gateway.completion(body, caller_of(request)))

    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _while_connected(request, gateway.tokenize(await _body(request, gateway)))

    @api.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _while_connected(request, gateway.detokenize(await _body(request, gateway)))

    @api.api_route("/v1/models", methods=_READ)
    async def models() -> Response:
        return JsonBytes(gateway.models())

    @api.api_route("/v1/models/{name:path}", methods=_READ)
    async def model(name: str) -> Response:
        return JsonBytes(gateway.model(name))

    document = openapi(metadata.version("coterie"))
    html = page(document)

    @api.api_route("/openapi.json", methods=_READ)
    async def description() -> Response:
        return JsonBytes(document)

    @api.api_route("/docs", methods=_READ)
    async def docs() -> Response:
        return Response(html, media_type="text/html", headers=_PAGE_HEADERS)

    @api.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        return Response(await gateway.metrics(), media_type=METRICS_TYPE)

    @api.api_route("/health", methods=_READ)
    async def health() -> Response:
        return JsonBytes({"status": "alive"})

    @api.api_route("/ready", methods=_READ)
    async def ready() -> Response:
        is_ready, body = await gateway.ready()
        return JsonBytes(body, status_code=200 if is_ready else 503)

    @api.exception_handler(CoterieError)
    async def ours(request: Request, error: CoterieError) -> Response:
        status, body, headers = envelope(error)
        if status >= 500 and status != 503:
            log.error("Request failed: %s", error)
        return JsonBytes(body, status_code=status, headers=headers)

    @api.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> Response:
        code = HTTP_CODES.get(error.status_code)
        kind = ErrorKind(error.status_code, "invalid_request_error", code)
        said = {404: "There is no such URL", 405: "This URL takes another method"}
        text = f"{said.get(error.status_code, error.detail)}: {request.method} {request.url.path}"
        headers = dict(error.headers or {})
        return JsonBytes(error_object(text, kind), status_code=error.status_code, headers=headers)

    @api.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        # It left before it had sent its body: nobody's fault, and nobody reads this.
        return Response(status_code=_CLIENT_GONE)

    @api.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, so Serve logs it with its traceback.
        status, body, headers = envelope(error)
        return JsonBytes(body, status_code=status, headers=headers)

    add_gate(api, gateway.serving, gateway.access, gateway.limits)
    return api


class JsonBytes(Response):
    """A JSON body, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return msgspec.json.encode(content)


class Events(Response):
    """Server-sent events. However it ends, the request's place is freed."""

    media_type = "text/event-stream"

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface. Ends when the events do, or when the client leaves."""
        try:
            with contextlib.suppress(ClientGone):
                await _race(receive, self._send_all(send))
        finally:
            self._stream.cancel()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._stream.events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


async def _while_connected(
    request: Request, work: Coroutine[Any, Any, dict[str, Any] | EventStream]
) -> Response:
    try:
        result = await _race(request.receive, work)
    except ClientGone:
        return Response(status_code=_CLIENT_GONE)
    return Events(result) if isinstance(result, EventStream) else JsonBytes(result)


async def _race(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; cancels it and raises ClientGone when the client leaves first.

    The server's own cancellation on disconnect depends on request headers; this does not.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    handed_over = False
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            handed_over = True
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        elif not handed_over and not task.cancelled() and task.exception() is None:
            # Cancelled in the very turn in which the work was done: nobody will read it.
            result = task.result()
            if isinstance(result, EventStream):
                result.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _body(request: Request, gateway: Gateway) -> bytes:
    """The body, read no further than the limit. Raises RequestError."""
    if (refusal := refused_header(request.scope["headers"])) is not None:
        raise refusal
    limit = gateway.serving.max_body_bytes
    whole = request.scope.get(SCOPE_BODY)
    if whole is not None and len(whole) <= limit:
        return bytes(whole)
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLargeError(f"The body has {declared} bytes; the limit is {limit} bytes.")
    parts = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise BodyTooLargeError(f"The body has over {limit} bytes, which is the limit.")
    return b"".join(parts)
