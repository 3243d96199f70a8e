"""`coterie status` against small servers of ours."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import typer

from app.commands.status import read_status, status
from core.errors import CoterieError

READY = {
    "/health": (200, {}),
    "/ready": (200, {"ready": True, "replicas": 1}),
    "/v1/models": (200, {"data": [{"id": "tiny"}]}),
}


@pytest.fixture
def server():
    answers = dict(READY)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            code, body = answers.get(self.path, (404, {}))
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    http.answers = answers
    http.url = f"http://127.0.0.1:{http.server_address[1]}"
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_ready_service(server, capsys):
    found = read_status(f"{server.url}/")
    assert found == {
        "url": server.url,
        "alive": True,
        "ready": True,
        "models": ["tiny"],
        "needs_key": False,
        "details": {"ready": True, "replicas": 1},
    }
    status(server.url, as_json=True)
    assert json.loads(capsys.readouterr().out) == found


def test_each_model_and_group_has_a_line(server, capsys):
    one = {"ready": True, "replicas": 1, "ready_replicas": 1}
    none = {"ready": False, "replicas": 0, "ready_replicas": 0, "reason": "it is DEPLOY_FAILED"}
    both = {"ready": False, "replicas": 1, "ready_replicas": 1, "groups": {"": one, "small": none}}
    body = {"ready": False, "models": {"demo": both, "coder": one}}
    server.answers["/ready"] = (503, body)
    with pytest.raises(typer.Exit):
        status(server.url)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "model demo: not ready, 1 of 1 replicas ready",
        "  group without a name: ready, 1 of 1 replicas ready",
        "  group small: not ready, 0 of 0 replicas ready, it is DEPLOY_FAILED",
        "model coder: ready, 1 of 1 replicas ready",
    ]


def test_one_that_is_not_ready_says_why_and_exits_1(server, capsys):
    server.answers["/ready"] = (503, {"ready": False, "reason": "the rank starts"})
    with pytest.raises(typer.Exit) as ended:
        status(server.url)
    assert ended.value.exit_code == 1
    printed = capsys.readouterr().out
    assert "not ready" in printed
    assert "the rank starts" in printed


def test_a_stranger_at_the_port_is_not_ready(server):
    server.answers.clear()
    server.answers["/v1/models"] = (200, b"<html>")
    found = read_status(server.url)
    assert not found["alive"]
    assert not found["ready"]
    assert found["models"] == []


def test_a_stranger_that_speaks_json_is_shown_as_far_as_it_goes(server, capsys):
    server.answers["/ready"] = (503, {"models": {"a": 1, "b": {}}, "groups": [1]})
    server.answers["/v1/models"] = (200, {"data": [1, {"name": "x"}, {"id": "y"}]})
    with pytest.raises(typer.Exit):
        status(server.url)
    printed = capsys.readouterr().out
    assert "models: y" in printed and "model b: not ready" in printed


def test_nobody_there_is_an_error(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(CoterieError, match="no answer from"):
        read_status(server.url)


def test_proxies_of_the_environment_are_not_asked(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert read_status(server.url)["ready"]
