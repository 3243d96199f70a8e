"""The proxy is not asked for a disconnect while the answer may come at once."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve._private.http_util import ASGIReceiveProxy

from deployments import late_receive
from deployments.proxy_guard import SCOPE_BODY


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("__init__", "fetch_until_disconnect"):
        monkeypatch.setattr(ASGIReceiveProxy, name, getattr(ASGIReceiveProxy, name))
    late_receive.listen_late()
    yield
    if hasattr(ASGIReceiveProxy, "_listens_late"):
        del ASGIReceiveProxy._listens_late


async def times_of_calls(scope: dict[str, Any]) -> tuple[float, str]:
    """(seconds until the proxy was asked, the event that the application received)."""
    clock = asyncio.get_running_loop().time
    began, asked = clock(), []

    async def ask_the_proxy(metadata: Any) -> bytes:
        asked.append(clock() - began)
        return pickle.dumps([{"type": "http.disconnect"}])

    receive = ASGIReceiveProxy({"type": "http", **scope}, None, ask_the_proxy)
    task = asyncio.create_task(receive.fetch_until_disconnect())
    event = await receive()
    await task
    assert len(asked) == 1
    return asked[0], event["type"]


def test_a_request_with_its_body_is_listened_to_a_moment_later() -> None:
    after_s, event = asyncio.run(times_of_calls({SCOPE_BODY: b"{}"}))
    assert after_s >= 0.9 * late_receive.LISTEN_AFTER_S
    assert event == "http.disconnect"


def test_a_request_whose_body_is_still_to_come_is_listened_to_at_once() -> None:
    after_s, _ = asyncio.run(times_of_calls({}))
    assert after_s < late_receive.LISTEN_AFTER_S


def test_listening_late_twice_delays_once() -> None:
    once = ASGIReceiveProxy.fetch_until_disconnect
    late_receive.listen_late()
    assert ASGIReceiveProxy.fetch_until_disconnect is once
