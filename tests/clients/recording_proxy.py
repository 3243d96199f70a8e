"""A proxy on loopback that writes down what clients ask of a server, and passes everything on.

Bodies of one shape (method, path and names of all fields) are kept twice at most: enough to replay
each kind of request that a client makes.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

KEPT_OF_A_SHAPE = 2
KEPT_HEADERS = ("accept", "content-type", "user-agent")
PART_BYTES = 65536
TIMEOUT_S = 300
HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "keep-alive", "date", "server")


class RecordingProxy:
    """Listens at `url` and forwards to 127.0.0.1:`port`; `requests` is what was seen."""

    def __init__(self, port: int) -> None:
        self.requests: list[dict[str, Any]] = []
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.refusals: list[str] = []
        self._shapes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._http = _QuietServer(("127.0.0.1", 0), _handler(self, port))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> RecordingProxy:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    def note(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        value = json.loads(body) if body else None
        shape = f"{method} {path} {names_in(value)}"
        with self._lock:
            self._shapes[shape] += 1
            if self._shapes[shape] <= KEPT_OF_A_SHAPE:
                kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
                entry = {"method": method, "path": path, "headers": kept, "body": value}
                self.requests.append(entry)

    def answered(self, method: str, path: str, status: int, body: bytes) -> None:
        with self._lock:
            self.statuses[f"{method} {path}", status] += 1
            if status >= 400:
                self.refusals.append(f"{method} {path}: {status} {body[:300]!r}")


def names_in(value: Any) -> Any:
    """The names of all fields, values left out; of a list, one item of each shape."""
    if isinstance(value, dict):
        return {name: names_in(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return sorted({json.dumps(names_in(item)) for item in value})
    return type(value).__name__


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that close their connections are no news; the rest is."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _handler(proxy: RecordingProxy, port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _forward(self) -> None:
            body = self._body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            proxy.note(self.command, self.path, headers, body)
            passed = {name: value for name, value in headers.items() if name not in HOP_BY_HOP}
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
            try:
                upstream.request(self.command, self.path, body, passed)
                answer = upstream.getresponse()
                seen = self._pass_on(answer)
                proxy.answered(self.command, self.path, answer.status, seen)
            finally:
                upstream.close()

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _pass_on(self, answer: http.client.HTTPResponse) -> bytes:
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            seen = b""
            while part := answer.read1(PART_BYTES):
                seen += part[: max(0, 300 - len(seen))]
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return seen

    return Handler
