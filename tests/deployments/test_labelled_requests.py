"""From HTTP headers and bodies to the labels that replicas see, and to the request log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.domain_classifier import DomainClassifier, DomainGuesser
from deployments.domain_settings import DomainSettings
from deployments.request_labels import HINT_CONFIDENCE, Labeller
from deployments.settings import ServingSettings
from tests.deployments.labelled_gateway import LabelledGateway
from tests.deployments.small_domains import small_weights
from tests.serving.tiny_model_folder import make_folder

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("l"))


@pytest.fixture
def front(folder: Path, tmp_path: Path) -> LabelledGateway:
    serving = ServingSettings(request_log=str(tmp_path), cors_origins=("https://a.example",))
    labeller = Labeller(DomainGuesser(DomainClassifier(small_weights())), DomainSettings())
    return LabelledGateway(folder, labeller, serving)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


def test_a_chat_and_a_completion_are_labelled_by_their_text(front: LabelledGateway) -> None:
    assert front.ask(CHAT, chat("pizza and salad")).status_code == 200
    assert front.ask(TEXT, completion("import class")).status_code == 200
    assert [domain for domain, _, _ in front.labels()] == ["food", "code"]
    assert all(confidence > 0.9 for _, _, confidence in front.labels())


def test_each_prompt_of_a_body_has_its_own_label(front: LabelledGateway) -> None:
    prompts = ["pizza and salad", "import class", "who knows", "burger"]
    assert front.ask(TEXT, completion(prompts)).status_code == 200
    assert [domain for domain, _, _ in front.labels()] == ["food", "code", "", "food"]


def test_headers_hint_the_domain_and_name_the_session(front: LabelledGateway) -> None:
    headers = {"x-coterie-domain": "code", "x-session-id": "chat 7"}
    assert front.ask(TEXT, completion([1, 2, 3]), headers).status_code == 200
    assert front.ask(CHAT, chat("who knows"), headers).status_code == 200
    (ids, text) = front.labels()
    assert ids == text and ids[0] == "code" and ids[2] == HINT_CONFIDENCE
    assert len(ids[1]) == 24 and "chat" not in ids[1]


def test_the_bodys_user_is_the_session_where_no_header_names_one(front: LabelledGateway) -> None:
    front.ask(CHAT, chat("hi", user="ann"))
    front.ask(TEXT, completion("hi", user="ann"))
    front.ask(CHAT, chat("hi", user="ann"), {"x-session-id": "7"})
    front.ask(CHAT, chat("hi"), {"x-session-id": "7"})
    front.ask(CHAT, chat("hi"))
    ann, same, seven, also_seven, none = [session for _, session, _ in front.labels()]
    assert ann == same and seven == also_seven and len({ann, seven, none}) == 3 and none == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-coterie-domain", b"Code"),
        ("x-coterie-domain", b"a b"),
        ("x-coterie-domain", b"x" * 65),
        ("x-coterie-domain", b"caf\xc3\xa9"),
        ("x-session-id", b"x" * 257),
        ("x-session-id", b"\xff\xfe"),
        ("x-session-id", b"a\tb"),
    ],
)
def test_a_header_that_cannot_be_a_name_is_refused_by_name(
    front: LabelledGateway, name: str, value: bytes
) -> None:
    answer = front.ask(CHAT, chat("hi"), [(name.encode(), value)])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert not front.replicas.asked


def test_different_values_of_one_header_are_refused_and_equal_ones_are_one(
    front: LabelledGateway,
) -> None:
    twice = [("x-coterie-domain", "code"), ("x-coterie-domain", "food")]
    assert front.ask(CHAT, chat("hi"), twice).status_code == 400
    assert front.ask(CHAT, chat("hi"), twice[:1] * 2).status_code == 200


def test_a_hint_of_no_domain_and_an_empty_one_change_nothing(front: LabelledGateway) -> None:
    for hint in ("weather", "unknown", ""):
        assert front.ask(CHAT, chat("pizza"), {"x-coterie-domain": hint}).status_code == 200
    assert [domain for domain, _, _ in front.labels()] == ["food"] * 3


def test_web_pages_may_send_both_headers(front: LabelledGateway) -> None:
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-coterie-domain, x-session-id, content-type",
    }
    answer = front.ask(CHAT, {}, asked, method="OPTIONS")
    assert answer.status_code == 200, answer.text


def test_the_log_has_domains_hint_and_the_hash_of_the_session(
    front: LabelledGateway, tmp_path: Path
) -> None:
    headers = {"x-coterie-domain": "code", "x-session-id": "secret-name"}
    front.ask(TEXT, completion(["pizza salad burger", "import", "import class"]), headers)
    front.ask(CHAT, chat("who knows"))
    (file,) = tmp_path.glob("requests-*.jsonl")
    first, second = [json.loads(line) for line in file.read_text().splitlines()]
    assert first["domains"] == ["food", "code"] and first["domain_hint"] == "code"
    assert first["session"] == front.labels()[0][1]
    assert "secret-name" not in file.read_text()
    assert second["domains"] == [""] and "session" not in second and "domain_hint" not in second


def test_a_gateway_without_a_labeller_labels_nothing(folder: Path) -> None:
    front = LabelledGateway(folder, None)
    assert front.ask(CHAT, chat("pizza"), {"x-session-id": "7"}).status_code == 200
    assert front.labels() == [("", "", 0.0)]
