"""The rank's loop: one request's fault is that request's, and every lasting idleness is checked."""

from __future__ import annotations

import threading
import time

import pytest

from core.request import Request, SamplingParams
from core.step import StepResult, StepStats
from deployments.rank_actor import StepLoop
from deployments.rank_channel import Add, Cancel, Idle, Rejected, Stop

PARAMS = SamplingParams(max_tokens=1)


class Link:
    """Keeps what goes up, hands down what it is given."""

    def __init__(self, down=()):
        self.sent = []
        self.down = list(down)

    def send(self, message):
        self.sent.append(message)

    def receive(self):
        if not self.down:
            return None
        message = self.down.pop(0)
        if isinstance(message, Exception):
            raise message
        return message


class IdleEngine:
    """Has no work; counts checks; a request named "odd" breaks its intake."""

    def __init__(self):
        self.checks = 0
        self.cancelled = []

    def add(self, request):
        if request.request_id == "odd":
            raise KeyError("intake")

    def cancel(self, request_id, index=None):
        self.cancelled.append(request_id)

    def has_work(self):
        return False

    def gauges(self):
        return StepStats(step=0, step_s=0.0)

    def check_invariants(self):
        self.checks += 1

    def close(self):
        pass


def request(name):
    return Request(request_id=name, prompt_ids=(1,), params=PARAMS)


def test_a_request_that_breaks_the_intake_is_refused_alone() -> None:
    link, engine = Link(), IdleEngine()
    loop = StepLoop(link)
    for message in (Add(request("odd")), Add(request("fine")), Stop()):
        loop._inbox.put(message)
    loop.run(engine)
    refused = [message for message in link.sent if isinstance(message, Rejected)]
    assert [message.request_id for message in refused] == ["odd"]
    assert engine.cancelled == ["odd"], "what was half taken is taken back"


def test_a_message_that_makes_no_sense_ends_the_rank() -> None:
    link = Link([ValueError("garbage")])
    loop = StepLoop(link)
    with pytest.raises(ValueError, match="garbage"):
        loop.read()
    loop.run(IdleEngine())  # returns: a deaf rank does not go on


def test_the_last_idle_state_is_checked_though_the_one_before_was_a_moment_ago(monkeypatch) -> None:
    monkeypatch.setattr("deployments.rank_actor.INVARIANTS_EVERY_S", 0.2)
    link, engine = Link(), IdleEngine()
    loop = StepLoop(link)
    thread = threading.Thread(target=loop.run, args=(engine,))
    thread.start()
    loop._inbox.put(Add(request("fine")))  # idle again at once, within the throttle
    deadline = time.monotonic() + 10
    while engine.checks < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    loop._inbox.put(Stop())
    thread.join(10)
    assert engine.checks == 2
    idle = [message.checked for message in link.sent if isinstance(message, Idle)]
    assert idle == [True, False, True]


class PutOffEngine(IdleEngine):
    """Has work, and puts its steps off for so long."""

    def __init__(self, hold_s):
        super().__init__()
        self.put_off_s = hold_s
        self.added = []
        self.stepped = threading.Event()

    def add(self, request):
        self.added.append(request.request_id)

    def has_work(self):
        return True

    def hold_s(self):
        return self.put_off_s

    def step(self):
        self.stepped.set()
        time.sleep(0.001)
        return StepResult(outputs=(), stats=self.gauges())


def test_messages_are_taken_at_once_while_a_step_is_put_off() -> None:
    engine = PutOffEngine(60.0)
    loop = StepLoop(Link())
    thread = threading.Thread(target=loop.run, args=(engine,))
    thread.start()
    time.sleep(0.05)
    for name in ("one", "two"):
        loop._inbox.put(Add(request(name)))
    loop._inbox.put(Cancel("one"))
    deadline = time.monotonic() + 5
    while not engine.cancelled and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.added == ["one", "two"]
    assert engine.cancelled == ["one"]
    assert not engine.stepped.is_set()
    engine.put_off_s = 0.0
    loop._inbox.put(Add(request("three")))
    assert engine.stepped.wait(5)
    engine.put_off_s = 60.0
    loop._inbox.put(Stop())
    thread.join(5)
    assert not thread.is_alive()


def test_a_step_comes_when_its_time_is_over_though_nobody_writes() -> None:
    engine = PutOffEngine(0.02)
    loop = StepLoop(Link())
    thread = threading.Thread(target=loop.run, args=(engine,))
    thread.start()
    assert engine.stepped.wait(5)
    loop._inbox.put(Stop())
    thread.join(5)
    assert not thread.is_alive()
