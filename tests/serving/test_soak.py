"""Hundreds of requests, a tenth of them cancelled: nothing is left behind, no memory grows."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.serving.conftest import LiveApp
from tests.serving.http_client import events, leave_after, post

pytestmark = pytest.mark.serve

CLIENTS = 8
WARM_REQUESTS = 100
MAX_GROWTH = 1.03
TEXT = "/v1/completions"
WORDS = ("once", "the patient", "asked", "for a small loan", "和你好", "sum of primes", "def")


def one_request(app: LiveApp, number: int) -> str:
    """Run one request of a mixed load; what became of it."""
    chance = random.Random(number)
    body = {
        "model": "demo",
        "prompt": " ".join(chance.choices(WORDS, k=chance.randint(1, 60))),
        "max_tokens": chance.randint(1, 24),
        "seed": number,
        "stream": chance.random() < 0.5,
    }
    if number % 10 == 9:
        body |= {"max_tokens": 300, "ignore_eos": True}
        leave_after(app.url, TEXT, body, None, linger_s=chance.random() * 0.3)
        return "left"
    if chance.random() < 0.2:
        body |= {"stop": [chance.choice("aeio")], "n": 2}
    response = post(app.url, TEXT, body)
    assert response.status_code == 200, response.text
    if body["stream"]:
        assert not any("error" in event for event in events(response.text)[:-1])
    return "answered"


def idle_bytes(app: LiveApp, rank: psutil.Process) -> int:
    """The rank's resident memory after an idle check, where it gives back what it freed.

    That check is of its invariants too: the rank ends if they do not hold.
    """
    before = app.status()["idle_checks"]
    one_request(app, 1)
    deadline = time.monotonic() + 20
    while (status := app.status())["idle_checks"] == before:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return int(rank.memory_info().rss)


def soak(app: LiveApp, requests: int) -> None:
    before = app.status()
    rank = psutil.Process(int(before["rank_pid"]))
    with ThreadPoolExecutor(CLIENTS) as pool:
        first = list(pool.map(lambda number: one_request(app, number), range(WARM_REQUESTS)))
        warm_bytes = idle_bytes(app, rank)
        numbers = range(WARM_REQUESTS, requests)
        rest = list(pool.map(lambda number: one_request(app, number), numbers))
    outcomes = first + rest
    assert outcomes.count("left") == requests // 10
    deadline = time.monotonic() + 20
    gauges = ("running", "waiting", "waiting_prompt_tokens", "engine_running", "engine_waiting")
    while any(app.status()[name] for name in (*gauges, "kv_used")):
        assert time.monotonic() < deadline, app.status()
        time.sleep(0.05)
    end_bytes = idle_bytes(app, rank)
    after = app.status()
    assert after["remakes"] == before["remakes"] and after["failed"] == before["failed"]
    assert after["refused"] == before["refused"]
    answered = after["completed"] - before["completed"]
    assert answered >= outcomes.count("answered")
    assert answered + after["aborted"] - before["aborted"] <= requests + 2
    growth = end_bytes / warm_bytes
    print(
        f"rank memory: {warm_bytes >> 20} MiB warm, {end_bytes >> 20} MiB at the end: {growth:.4f}"
    )
    assert growth <= MAX_GROWTH


def test_five_hundred_requests_leave_nothing_behind(demo_app: LiveApp) -> None:
    soak(demo_app, 500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_thousand_requests_leave_nothing_behind(demo_app: LiveApp) -> None:
    soak(demo_app, 2000)
