"""Small helpers of tests that talk HTTP: raw events, and clients that leave early."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

DONE = "[DONE]"


def post(url: str, path: str, body: Any, **extra: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **extra.pop("headers", {})}
    return httpx.post(url + path, content=content, headers=headers, timeout=60, **extra)


def events(text: str) -> list[Any]:
    """The data of each server-sent event; the end mark as it is."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [data if data == DONE else json.loads(data) for data in found]


def leave_after(
    url: str, path: str, body: dict[str, Any], wait_for: bytes | None, linger_s: float = 0.0
) -> None:
    """Send a request and close the connection, at once or when `wait_for` was seen."""
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {parts.path}{path} HTTP/1.1\r\nhost: {parts.hostname}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    assert parts.hostname is not None and parts.port is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(head.encode() + content)
        seen = b""
        while wait_for is not None and wait_for not in seen:
            part = connection.recv(4096)
            assert part, f"the server closed first: {seen!r}"
            seen += part
        time.sleep(linger_s)
