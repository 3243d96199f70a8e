"""Several models in one application, as Serve runs them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.domain_settings import DomainSettings
from tests.serving import fake_engines
from tests.serving.conftest import FAKE_ENGINE, FAKE_SERVING, LiveApp, deploy
from tests.serving.http_client import DONE, events, post
from tests.waiting import until

pytestmark = pytest.mark.serve

TEXT = "/v1/completions"
FACTORY = "tests.serving.fake_engines:open_engine"
BROKEN = "tests.serving.fake_engines:open_broken_engine"
ONE, TWO = "Supervisor", "Supervisor-two"


def built(folder: Path, factory_of_two: str) -> Any:
    from deployments.application import application_of
    from deployments.dispatch_rules import DispatchRule
    from deployments.replica_plan import ReplicaPlan

    small = {**FAKE_ENGINE, "max_sequences": 4}
    plans = [
        ReplicaPlan("one", str(folder), FAKE_SERVING, FAKE_ENGINE, engine_factory=FACTORY),
        ReplicaPlan("two", str(folder), FAKE_SERVING, small, engine_factory=factory_of_two),
    ]
    return application_of(
        plans,
        FAKE_SERVING,
        domains=DomainSettings(classifier="off", labels=("code",)),
        rules=[DispatchRule(domain="code", to_model="two")],
    )


@pytest.fixture(scope="module")
def app(live_serve: str, tiny_folder: Path) -> Iterator[LiveApp]:
    from ray import serve

    yield deploy("models", live_serve, "one", built(tiny_folder, FACTORY))
    serve.delete("models")


def status(app: LiveApp, deployment: str) -> dict[str, float]:
    from deployments.running_application import ask_all

    (found,) = ask_all(app.name, deployment, "status", limit_s=30)
    return dict(found)


def slow(model: str, tokens: int) -> dict[str, Any]:
    body = {"model": model, "prompt": "ab" * 20, "max_tokens": tokens, "stream": True}
    return {**body, "seed": fake_engines.SLOW_MS + 30}


def test_both_models_answer_the_official_client_under_their_names(app: LiveApp) -> None:
    client = openai.OpenAI(base_url=app.url + "/v1", api_key="x", max_retries=0, timeout=60)
    assert [model.id for model in client.models.list()] == ["one", "two", "auto"]
    for name in ("one", "two"):
        before = status(app, ONE)["completed"], status(app, TWO)["completed"]
        answer = client.completions.create(model=name, prompt="the DEF")
        assert (answer.model, answer.choices[0].text) == (name, "the DEF")
        after = status(app, ONE)["completed"], status(app, TWO)["completed"]
        assert [b - a for a, b in zip(before, after, strict=True)] == [name == "one", name == "two"]
    hint = {"x-coterie-domain": "code"}
    asked = {"model": "auto", "prompt": "the DEF"}
    assert client.completions.create(**asked).model == "one"
    assert client.completions.create(**asked, extra_headers=hint).model == "two"
    with pytest.raises(openai.NotFoundError, match="'one', 'two', 'auto'"):
        client.completions.create(model="three", prompt="a")


def test_ready_and_metrics_tell_of_both(app: LiveApp) -> None:
    details = httpx.get(app.url + "/ready").json()
    assert {name: part["ready"] for name, part in details["models"].items()} == {
        "one": True,
        "two": True,
    }
    page = httpx.get(app.url + "/metrics").text
    samples = [line for line in page.splitlines() if line.startswith("coterie_ready{")]
    assert len(samples) == 2
    assert all(f'model_name="{name}"' in page for name in ("one", "two"))


def test_a_rank_that_dies_leaves_the_other_models_streams_alone(app: LiveApp) -> None:
    ranks = [int(status(app, name)["rank_pid"]) for name in (ONE, TWO)]
    assert len(set(ranks)) == 2
    steps = {name: status(app, name)["steps"] for name in (ONE, TWO)}
    with ThreadPoolExecutor(2) as pool:
        streams = {
            name: pool.submit(post, app.url, TEXT, slow(name, 60)) for name in ("one", "two")
        }
        until(lambda: all(status(app, name)["steps"] > steps[name] + 5 for name in (ONE, TWO)))
        os.kill(ranks[0], signal.SIGKILL)
        frames = {name: events(stream.result().text) for name, stream in streams.items()}
    assert frames["one"][-1] == DONE and "error" in frames["one"][-2]
    assert not [frame for frame in frames["two"][:-1] if "error" in frame]
    assert frames["two"][-2]["choices"][0]["finish_reason"] == "length"
    until(lambda: status(app, ONE)["ready"])
    assert status(app, ONE)["rank_pid"] not in (0, ranks[0])
    assert post(app.url, TEXT, {"model": "one", "prompt": "abc"}).status_code == 200
    assert int(status(app, TWO)["rank_pid"]) == ranks[1]


def test_an_operator_sees_and_drains_both(app: LiveApp) -> None:
    from app.commands.admin import ask_supervisors, listed_requests
    from deployments.running_application import drain

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(post, app.url, TEXT, slow(name, 40)) for name in ("one", "two")]
        listed = until(lambda: found if len(found := listed_requests(app.name)) == 2 else [])
        assert {one["model"] for one in listed} == {"one", "two"}
        assert drain(app.name, 10.0)
        for stream in streams:
            frames = events(stream.result().text)
            assert frames[-1] == DONE and "error" not in frames[-2], "running ones end in peace"
    for name in ("one", "two"):
        assert post(app.url, TEXT, {"model": name, "prompt": "abc"}).status_code == 503
    assert all(said["draining"] for (said,) in ask_supervisors(app.name, "status").values())


def test_a_model_that_cannot_start_takes_no_other_down(live_serve: str, tiny_folder: Path) -> None:
    from ray import serve

    with pytest.raises(RuntimeError, match=TWO):
        deploy("half", live_serve, "one", built(tiny_folder, BROKEN))
    url = f"{live_serve}/half"
    until(lambda: httpx.get(url + "/ready").status_code != 404)
    assert post(url, TEXT, {"model": "one", "prompt": "abc"}).status_code == 200
    refused = post(url, TEXT, {"model": "two", "prompt": "abc"})
    assert refused.status_code == 503
    assert "could not be started" in refused.json()["error"]["message"]
    answer = httpx.get(url + "/ready")
    assert answer.status_code == 503
    models = answer.json()["models"]
    assert models["one"]["ready"]
    assert models["two"]["reason"] == "the model's deployment is DEPLOY_FAILED"
    serve.delete("half")
