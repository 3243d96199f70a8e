"""A request that has to wait is announced to the engine, which may ignore it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from core.errors import BudgetError
from deployments.rank_actor import StepLoop
from deployments.rank_channel import Add, Hint, Stop
from deployments.settings import ServingSettings, hand_over_limit
from tests.deployments.test_rank_loop import IdleEngine, Link, request
from tests.serving import domain_engines
from tests.serving.fake_engines import SLOW_MS
from tests.serving.http_client import post
from tests.serving.local_server import LocalServer
from tests.serving.tiny_model_folder import make_folder

HINT = Hint(request_id="r", tenant="t", domain="code", session="s", first_ids=(1, 2, 3))


class Hinted(IdleEngine):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.hints: list[dict[str, Any]] = []
        self.added: list[str] = []
        self.broken = broken

    def hint(self, **labels: Any) -> None:
        self.hints.append(labels)
        if self.broken:
            raise BudgetError("no room")

    def add(self, request: Any) -> None:
        self.added.append(request.request_id)


def loop_through(engine: IdleEngine, *messages: Any) -> None:
    loop = StepLoop(Link())
    for message in (*messages, Stop()):
        loop._inbox.put(message)
    loop.run(engine)


def test_the_engine_gets_the_labels_and_the_first_tokens() -> None:
    engine = Hinted()
    loop_through(engine, HINT)
    assert engine.hints == [
        {"domain": "code", "session": "s", "tenant": "t", "first_ids": (1, 2, 3)}
    ]


def test_an_engine_that_takes_no_hints_loses_nothing() -> None:
    engine = IdleEngine()
    loop_through(engine, HINT, Add(request("fine")))
    assert not hasattr(engine, "hint")


def test_a_broken_hint_is_the_last_one_and_harms_no_request() -> None:
    engine = Hinted(broken=True)
    loop_through(engine, HINT, HINT, Add(request("fine")))
    assert len(engine.hints) == 1 and engine.added == ["fine"]


def test_only_those_who_wait_are_announced(tmp_path: Path) -> None:
    domain_engines.HINTS.clear()
    folder = make_folder(tmp_path / "model")
    serving = ServingSettings(max_queued_requests=50)
    engine = {"max_sequences": 1, "context_tokens": 2048}
    factory = "tests.serving.domain_engines:open_engine"
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 3, "seed": SLOW_MS + 20}
    with LocalServer(folder, serving, engine, factory) as server:
        assert post(server.url, "/v1/completions", body).status_code == 200
        assert domain_engines.HINTS == [], "nobody waits"
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: post(server.url, "/v1/completions", body), range(8)))
        assert {answer.status_code for answer in answers} == {200}
    waited = 8 - hand_over_limit(1)
    assert 1 <= len(domain_engines.HINTS) <= waited
    assert domain_engines.HINTS[0]["first_ids"]
