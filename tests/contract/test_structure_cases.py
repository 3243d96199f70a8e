"""Structured output over HTTP, with the demo model: public bug reports and what they stand for."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from deployments.settings import ServingSettings
from tests.engine.schema_samples import PUBLIC
from tests.serving.http_client import DONE, events, post
from tests.serving.local_server import MODEL, LocalServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
DEMO = Path(__file__).resolve().parents[2] / "demo_model"
ENGINE = {
    "max_sequences": 8,
    "context_tokens": 512,
    "kv_memory": "64MiB",
    "structure_compile_s": 1.0,
}
SLOW = {"type": "string", "pattern": "^.{0,2000}x.{0,2000}$"}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(DEMO, ServingSettings(), ENGINE, "engine.engine:open_engine") as running:
        post(running.url, CHAT, body(structured_outputs={"choice": ["warm"]}))
        yield running


def body(**fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Say something."}
    return {"model": MODEL, "messages": [message], "max_tokens": 100, "seed": 1, **fields}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    return error


def answer(server: LocalServer, **fields: Any) -> tuple[str, str]:
    response = post(server.url, CHAT, body(**fields))
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"type": 5},
        {"type": "object", "properties": []},
        {"type": "object", "required": "a"},
        {"properties": {"a": {"minLength": -1}}},
        {"enum": []},
        {"anyOf": []},
        {"$ref": "#/$defs/none"},
        {"type": "string", "pattern": "(a"},
        False,
    ],
)
def test_an_invalid_schema_is_a_400_before_any_stream(
    server: LocalServer, schema: Any, stream: bool
) -> None:
    """29, vllm#17248: response_format with an invalid JSON schema."""
    asked = body(response_format=schema_format(schema), stream=stream)
    assert refusal(post(server.url, CHAT, asked))["param"] == "response_format"


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "a.not"),
        ({"if": {"type": "null"}, "then": {}}, "if"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "pattern"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ],
)
def test_a_keyword_that_cannot_be_held_to_is_named(
    server: LocalServer, schema: Any, keyword: str
) -> None:
    """The kind of 29: what a grammar would drop in silence is refused by its name and place."""
    error = refusal(post(server.url, CHAT, body(response_format=schema_format(schema))))
    assert keyword in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema_format("text")}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(((("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "rule without a root"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {"type": "nonsense"}}}, "structured_outputs"),
        ({"guided_regex": "(?!a)"}, "guided_regex"),
        ({"guided_choice": "red"}, "guided_choice"),
        ({"guided_json": {"type": "none"}}, "guided_json"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_a_wrong_form_is_a_400_that_names_its_field(
    server: LocalServer, fields: dict[str, Any], param: str
) -> None:
    assert refusal(post(server.url, CHAT, body(**fields)))["param"] == param
    assert answer(server, structured_outputs={"choice": ["fine"]}) == ("fine", "stop")


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"structured_outputs": {"choice": ["red", "grün"]}}, "red|grün"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]'}}, "a[0-9]"),
        ({"structured_outputs": {"json": {"enum": [1, "two"]}}}, '1|"two"'),
        ({"structured_outputs": {"json": '{"const": true}'}}, "true"),
        ({"guided_choice": ["old"]}, "old"),
        ({"guided_regex": "x{3}"}, "xxx"),
        ({"guided_json": {"const": 1}}, "1"),
        ({"guided_grammar": 'root ::= "b"'}, "b"),
        ({"response_format": {"type": "text"}, "guided_regex": "y"}, "y"),
    ],
)
def test_every_way_to_ask_binds_the_answer(
    server: LocalServer, fields: dict[str, Any], right: str
) -> None:
    text, reason = answer(server, **fields)
    assert re.fullmatch(right, text) and reason == "stop"
    whole = post(server.url, TEXT, {"model": MODEL, "prompt": "Say:", "max_tokens": 60, **fields})
    assert re.fullmatch(right, whole.json()["choices"][0]["text"])


def test_a_structured_stream_is_the_unstreamed_answer(server: LocalServer) -> None:
    chance = random.Random(8)
    finished = 0
    for number, schema in enumerate(PUBLIC):
        asked = {"response_format": schema_format(schema), "seed": chance.randrange(10**6)}
        text, reason = answer(server, **asked)
        response = post(server.url, CHAT, body(**asked, stream=True))
        received = events(response.text)
        assert received[-1] == DONE
        choices = [choice for chunk in received[:-1] for choice in chunk["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == text, number
        assert choices[-1]["finish_reason"] == reason
        if reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    assert finished >= len(PUBLIC) // 2


def test_a_stop_string_ends_a_structured_answer_too(server: LocalServer) -> None:
    text, reason = answer(server, structured_outputs={"regex": "(ab){20}"}, stop=["ba"])
    assert (text, reason) == ("a", "stop")


def test_a_catastrophic_schema_is_a_400_while_others_are_answered(server: LocalServer) -> None:
    """Compiling takes minutes; it is stopped, and nobody waits for it."""
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(post(server.url, CHAT, body(response_format=schema_format(SLOW))))

    bad = threading.Thread(target=ask)
    bad.start()
    time.sleep(0.2)
    response = post(server.url, CHAT, body(max_tokens=2))
    assert response.status_code == 200
    assert bad.is_alive() or refusal(replies[0])
    bad.join(60)
    assert "within 1 s" in refusal(replies[0])["message"]
    assert answer(server, structured_outputs={"choice": ["well"]}) == ("well", "stop")


def test_a_client_that_leaves_while_its_structure_is_compiled_frees_its_place(
    server: LocalServer,
) -> None:
    slow = {**SLOW, "pattern": SLOW["pattern"].replace("x", "y")}
    with httpx.Client(base_url=server.url, timeout=0.3) as http, pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=body(response_format=schema_format(slow)))
    deadline = time.monotonic() + 10
    while (status := server.status())["running"] or status["engine_waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert answer(server, structured_outputs={"choice": ["well"]}) == ("well", "stop")


def test_deep_and_huge_schemas_are_refused(server: LocalServer) -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(90):
        deep = {"type": "array", "items": deep}
    wide = {"enum": [f"value number {i}" for i in range(60_000)]}
    knot = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"minimum": 1}]}}, "$ref": "#/$defs/a"}
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    for schema in (deep, wide, knot, loop):
        refusal(post(server.url, CHAT, body(response_format=schema_format(schema))))
    assert answer(server, structured_outputs={"choice": ["well"]}) == ("well", "stop")
