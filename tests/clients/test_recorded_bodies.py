"""What public clients really sent (tests/clients/recorded/) is answered, in the shape they read.

Recorded by `python -m tests.clients.run_client all --record`, with the clients' own packages. Here
the bodies alone are replayed against the demo model, without Ray and without the clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deployments.settings import ServingSettings
from tests.clients.run_client import model_with_tools
from tests.serving.http_client import DONE, events, post
from tests.serving.local_server import MODEL, LocalServer

RECORDED = Path(__file__).resolve().parent / "recorded"
CLIENTS = ("openai", "litellm", "lm_eval", "guidellm", "aiperf", "vllm")
UNKNOWN_MODEL = "no-such-model"
ENGINE = {"max_sequences": 8, "kv_memory": 32 * 1024**2, "threads": 1}


def recorded() -> list[Any]:
    """Each body with the client and its number as the test's name."""
    found = []
    for name in CLIENTS:
        record = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
        for number, request in enumerate(record["requests"]):
            found.append(pytest.param(request, id=f"{name}-{number}"))
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = model_with_tools(tmp_path_factory.mktemp("clients"))
    factory = "engine.engine:open_engine"
    with LocalServer(folder, ServingSettings(), ENGINE, factory) as running:
        yield running


def test_every_client_is_recorded_with_its_version() -> None:
    for name in CLIENTS:
        record = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
        package, version = record["client"].split()
        assert package.startswith(name.split("_")[0]) and version[0].isdigit()
        assert record["requests"]


@pytest.mark.parametrize("request_", recorded())
def test_a_recorded_body_is_answered(server: LocalServer, request_: dict[str, Any]) -> None:
    body = dict(request_["body"])
    known = body["model"] != UNKNOWN_MODEL
    if known:
        body["model"] = MODEL
    answer = post(server.url, request_["path"], body, headers=request_["headers"])
    if not known:
        assert answer.status_code == 404
        assert UNKNOWN_MODEL in answer.json()["error"]["message"]
        return
    assert answer.status_code == 200, answer.text
    if request_["path"] == "/tokenize":
        assert answer.json()["count"] == len(answer.json()["tokens"]) > 0
    elif body.get("stream"):
        check_stream(answer.text, body)
    else:
        check_whole(answer.json(), body)


def check_whole(answer: dict[str, Any], body: dict[str, Any]) -> None:
    if "messages" in body:
        ChatCompletion.model_validate(answer, strict=True)
    elif not body.get("echo"):
        # With echo the first token's probability is null, as everywhere; OpenAI's type forbids it.
        Completion.model_validate(answer, strict=True)
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [None]
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts) * body.get("n", 1)))
    limit = body.get("max_completion_tokens") or body["max_tokens"]
    assert 1 <= answer["usage"]["completion_tokens"] <= limit * len(choices)
    for choice, prompt in zip(choices, prompts, strict=False):
        if body.get("echo"):
            check_echo(choice, prompt, body["max_tokens"])
        if body.get("tool_choice") == "required":
            check_calls(choice["message"]["tool_calls"], body, choice["finish_reason"] == "length")
        if "response_format" in body and choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def check_echo(choice: dict[str, Any], prompt: list[int], max_tokens: int) -> None:
    """lm-eval leaves out the last `max_tokens` entries whatever was generated: they must be there.

    The first token has no probability; all others have one, and each its best alternative.
    """
    logprobs = choice["logprobs"]
    values = logprobs["token_logprobs"]
    assert len(values) == len(prompt) + max_tokens == len(logprobs["top_logprobs"])
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])
    best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
    assert all(value <= top + 1e-6 for value, top in zip(values[1:], best, strict=True))


def check_calls(calls: list[dict[str, Any]], body: dict[str, Any], is_cut: bool) -> None:
    names = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    assert calls
    # The limit may cut the last one.
    for call in calls[: len(calls) - is_cut]:
        required = names[call["function"]["name"]]["required"]
        assert set(required) <= set(json.loads(call["function"]["arguments"]))


def check_stream(text: str, body: dict[str, Any]) -> None:
    received = events(text)
    assert received[-1] == DONE and received.count(DONE) == 1
    chunks = received[:-1]
    if "messages" in body:
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
    if (body.get("stream_options") or {}).get("include_usage"):
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens"] > 0 < last["usage"]["completion_tokens"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sum(choice["finish_reason"] is not None for choice in choices) == 1
    if isinstance(body.get("tool_choice"), dict):
        deltas = [call for x in choices for call in x["delta"].get("tool_calls") or ()]
        name = "".join(call["function"].get("name") or "" for call in deltas)
        arguments = "".join(call["function"].get("arguments") or "" for call in deltas)
        is_cut = any(choice["finish_reason"] == "length" for choice in choices)
        check_calls([{"function": {"name": name, "arguments": arguments}}], body, is_cut)
