"""What a request may ask and how its answer looks, by cases of users of other servers.

Gateway, supervisor and rank are the product's; the engine emits forced ids, over real HTTP.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deployments.openapi_page import ROUTES
from deployments.settings import ServingSettings
from tests.serving import fake_engines
from tests.serving.http_client import DONE, events, post
from tests.serving.local_server import MODEL, LocalServer
from tests.serving.tiny_model_folder import make_folder

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ENGINE = {"max_sequences": 4, "context_tokens": 512, "kv_memory": 10_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = make_folder(tmp_path_factory.mktemp("tiny") / "model")
    with LocalServer(folder, ServingSettings(max_prompts=12), ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def text_body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def answered(server: LocalServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = post(server.url, path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    if not body.get("echo"):  # the official type knows no null for an echo's first token
        (ChatCompletion if path == CHAT else Completion).model_validate(answer, strict=True)
    return answer


def streamed(server: LocalServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = post(server.url, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    received = events(response.text)
    assert received[-1] == DONE and received.count(DONE) == 1
    for chunk in received[:-1] if path == CHAT else ():
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return received[:-1]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def works(server: LocalServer) -> None:
    assert answered(server, TEXT, text_body("fine"))["choices"][0]["text"] == "fine"


# Usage


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_is_the_last_chunk_and_null_before(server: LocalServer, path: str) -> None:
    """15, vllm#6371, and 16, vllm#7262: also with several choices."""
    body = chat_body("abc") if path == CHAT else text_body("abc")
    chunks = streamed(server, path, {**body, "n": 2, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answered(server, path, {**body, "n": 2})["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for options in (None, {"include_usage": False}, {}):
        chunks = streamed(server, path, {**body, "stream_options": options})
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)


def test_usage_so_far_is_told_in_every_chunk_where_asked_for(server: LocalServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(server, TEXT, text_body("abcde", stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and chunks[-1]["choices"] == []
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}
    error = refusal(post(server.url, TEXT, text_body("a", stream_options=options)))
    assert error["param"] == "stream_options"


# Log-probabilities


def test_logprobs_need_no_alternatives(client: openai.OpenAI) -> None:
    """18, vllm#4795: in a stream, too."""
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}]}
    whole = client.chat.completions.create(**asked, logprobs=True)
    assert [token.top_logprobs for token in whole.choices[0].logprobs.content] == [[], [], []]
    tokens = [
        token
        for chunk in client.chat.completions.create(**asked, logprobs=True, stream=True)
        for choice in chunk.choices
        for token in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert [(token.token, token.top_logprobs) for token in tokens] == [(x, []) for x in "abc"]
    assert whole.choices[0].logprobs.content == tokens


def test_bytes_of_a_cut_character_join_to_the_text(server: LocalServer) -> None:
    """19, vllm#19177: echo, prompt and answer of Chinese text cut into bytes."""
    answer = answered(server, TEXT, text_body("世界", logprobs=1, echo=True))["choices"][0]
    tokens = answer["logprobs"]["tokens"]
    assert answer["text"] == "世界世界" and len(tokens) == 13
    assert tokens[-1] == "<|end|>"  # the end is a token here, and no text
    assert tokens[:3] == ["bytes:\\xe4", "bytes:\\xb8", "bytes:\\x96"]
    assert answer["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    content = answered(server, CHAT, chat_body("世界", logprobs=True))["choices"][0]["logprobs"]
    assert bytes(b for token in content["content"] for b in token["bytes"]).decode() == "世界"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"prompt_logprobs": 1_000_000}, "prompt_logprobs"),
        (TEXT, {"logprobs": 1_000_000}, "logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_alternatives_beyond_the_limit_are_refused(
    server: LocalServer, path: str, fields: dict[str, Any], param: str
) -> None:
    """21, sglang#40076."""
    body = chat_body("abc", **fields) if path == CHAT else text_body("abc", **fields)
    assert refusal(post(server.url, path, body))["param"] == param
    works(server)


def test_an_echo_with_logprobs_is_what_lm_eval_reads(server: LocalServer) -> None:
    """Loglikelihood: the context's count of tokens cuts the lists, the last token is dropped."""
    context, continuation = list(b"abc"), list(b"de")
    body = text_body([context + continuation], echo=True, logprobs=1, max_tokens=1, temperature=0)
    (choice,) = answered(server, TEXT, body)["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "abcdea"
    assert found["tokens"] == list("abcdea")
    assert found["token_logprobs"] == [None, -1 / 8, -2 / 8, -3 / 8, -4 / 8, -0.25]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][4] == {"A": 0.0, "e": -0.5}
    assert found["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert sum(found["token_logprobs"][len(context) : -1]) == -7 / 8
    lone = answered(server, TEXT, {**body, "max_tokens": 0})
    (choice,) = lone["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abcde", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert lone["usage"]["completion_tokens"] == 0 and lone["usage"]["total_tokens"] == 5


def test_an_echo_streams_as_it_is_whole(server: LocalServer) -> None:
    for prompt in ("the DEF 世", list(b"abc"), ["the", "世界"], [[65, 66], list("世".encode())]):
        body = text_body(prompt, echo=True, logprobs=2, n=2)
        whole = answered(server, TEXT, body)["choices"]
        chunks = [choice for chunk in streamed(server, TEXT, body) for choice in chunk["choices"]]
        for expected in whole:
            mine = [chunk for chunk in chunks if chunk["index"] == expected["index"]]
            assert "".join(chunk["text"] for chunk in mine) == expected["text"]
            for name, values in expected["logprobs"].items():
                assert [x for chunk in mine for x in chunk["logprobs"][name]] == values
            count = len(expected["logprobs"]["tokens"])
            assert all(len(values) == count for values in expected["logprobs"].values())


def test_an_echo_without_logprobs_repeats_the_prompt_as_it_was_sent(server: LocalServer) -> None:
    prompt = "  the <|user|>DEF\n世"
    assert answered(server, TEXT, text_body(prompt, echo=True, max_tokens=1))["choices"][0][
        "text"
    ].startswith(prompt)
    ids = [fake_engines.USER, *b"ab"]
    answer = answered(server, TEXT, text_body(ids, echo=True, max_tokens=0))
    assert answer["choices"][0]["text"] == "<|user|>ab"
    assert answer["choices"][0]["logprobs"] is None
    for fields in ({}, {"echo": False}):
        error = refusal(post(server.url, TEXT, text_body("ab", max_tokens=0, **fields)))
        assert error["param"] == "max_tokens" and "echo" in error["message"]
    assert refusal(post(server.url, CHAT, chat_body("ab", max_tokens=0)))["param"] == "max_tokens"
    assert refusal(post(server.url, CHAT, chat_body("ab", echo=True)))["param"] == "echo"


def test_prompt_logprobs_have_vllms_shape(server: LocalServer) -> None:
    answer = answered(server, TEXT, text_body("abc", prompt_logprobs=1))
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "65": {"logprob": 0.0, "rank": 1, "decoded_token": "A"},
        "98": {"logprob": -0.125, "rank": None, "decoded_token": "b"},
    }
    assert third["99"]["logprob"] == -0.25
    chat = answered(server, CHAT, chat_body("abc", prompt_logprobs=0))
    assert [next(iter(x)) for x in chat["prompt_logprobs"][1:]] == ["97", "98", "99", "266"]


# Parameters


@pytest.mark.parametrize(
    "bias", [{"999999": 5}, {"5": 1e300}, {"x": 1}, {"5": None}, {"5": "1"}, {" 5": 1}, {"5": 101}]
)
def test_a_bias_that_makes_no_sense_is_refused(server: LocalServer, bias: Any) -> None:
    """22, vllm PR#16529."""
    for path, body in ((CHAT, chat_body("a")), (TEXT, text_body("a"))):
        error = refusal(post(server.url, path, {**body, "logit_bias": bias}))
        assert error["param"] == "logit_bias"


def test_a_limit_beyond_the_context_is_refused_under_its_own_name(server: LocalServer) -> None:
    """25, vllm#33418."""
    for name in ("max_tokens", "max_completion_tokens"):
        error = refusal(post(server.url, CHAT, chat_body("abc", **{name: 10**9})))
        assert error["param"] == name and name in error["message"]
        assert "5 tokens" in error["message"] and "512" in error["message"]
    both = chat_body("abc", max_tokens=2, max_completion_tokens=3)
    assert refusal(post(server.url, CHAT, both))["param"] == "max_completion_tokens"
    same = chat_body("abc", max_tokens=2, max_completion_tokens=2)
    assert answered(server, CHAT, same)["choices"][0]["message"]["content"] == "ab"
    error = refusal(post(server.url, TEXT, text_body(["a", "b" * 600])))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "600" in error["message"]


def test_a_limit_left_out_is_what_the_context_leaves_or_the_cap(server: LocalServer) -> None:
    """26, vllm#6707."""
    body = text_body("ab" * 200, ignore_eos=True)
    assert len(answered(server, TEXT, body)["choices"][0]["text"]) == 112
    with LocalServer(server._model_dir, ServingSettings(default_max_tokens=7), ENGINE) as capped:
        assert len(answered(capped, TEXT, body)["choices"][0]["text"]) == 7


@pytest.mark.parametrize(
    "extra",
    [
        {"stop": ["a"] * 500_000},
        {"n": 100_000},
        {"best_of": 100_000},
        {"n": 2, "best_of": 1},
        {"prompt": ["a"] * 500_000},
        {"prompt": ["a"] * 13},
        {"prompt": ["a"] * 7, "n": 2},
        {"logit_bias": {str(n): 1 for n in range(2000)}},
        {"stop_token_ids": [1] * 100_000},
    ],
    ids=lambda extra: "-".join(extra),
)
def test_absurd_numbers_are_refused_at_once(server: LocalServer, extra: dict[str, Any]) -> None:
    """27, vllm PR#51447."""
    body = json.dumps({**text_body("abc"), **extra}).encode()
    began = time.monotonic()
    refusal(post(server.url, TEXT, body))
    assert time.monotonic() - began < 1.0
    works(server)


# Several prompts


def test_choices_are_numbered_through_the_prompts(server: LocalServer) -> None:
    for prompts in (["abc", "the", "世界"], [list(b"abc"), [259], list("世界".encode())]):
        whole = answered(server, TEXT, text_body(prompts, n=2))
        texts = [choice["text"] for choice in whole["choices"]]
        assert texts == ["abc", "abc", "the", "the", "世界", "世界"]
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        assert whole["usage"]["prompt_tokens"] == 3 + 1 + 6
        assert whole["usage"]["completion_tokens"] == 2 * (4 + 2 + 7)
        body = text_body(prompts, n=2, stream_options={"include_usage": True})
        chunks = streamed(server, TEXT, body)
        assert chunks[-1]["usage"] == whole["usage"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index, text in enumerate(texts):
            mine = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in mine) == text
            assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [
                "stop"
            ]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_list_of_one_prompt_is_that_prompt(server: LocalServer) -> None:
    for prompt in (["abc"], [list(b"abc")]):
        (choice,) = answered(server, TEXT, text_body(prompt))["choices"]
        assert choice["text"] == "abc"


def test_a_prompt_that_fails_fails_its_request_alone(server: LocalServer) -> None:
    """8, vllm#52852, with three prompts: one error frame, and nothing is left behind."""
    body = text_body(["abcdef", "a", "ab"], seed=fake_engines.RAISE_AT_TOKEN_3)
    assert refusal(post(server.url, TEXT, body), 500)["message"] == "the router produced NaN"
    received = events(post(server.url, TEXT, {**body, "stream": True}).text)
    if "error" not in received[0]:  # nothing was sent before it failed
        assert [event for event in received[:-1] if "error" in event] == [received[-2]]
        assert received[-1] == DONE
    works(server)
    deadline = time.monotonic() + 5
    while server.status()["engine_running"] or server.status()["kv_used"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.gateway.status()["open_requests"] == 0


def test_the_likeliest_of_many_are_given(server: LocalServer) -> None:
    whole = answered(server, TEXT, text_body(["abc", "the"], n=1, best_of=3))
    assert [choice["text"] for choice in whole["choices"]] == ["abc", "the"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in whole["choices"])
    assert whole["usage"]["completion_tokens"] == 3 * (4 + 2)
    error = refusal(post(server.url, TEXT, text_body("abc", best_of=2, stream=True)))
    assert error["param"] == "best_of"


# Requests and templates


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], [[97], []], None, {}, [None], [1.5], [[[1]]], [True]]
)
def test_prompts_without_anything_are_refused(server: LocalServer, prompt: Any) -> None:
    """31, vllm#7283."""
    assert refusal(post(server.url, TEXT, text_body(prompt)))["param"] == "prompt"


@pytest.mark.parametrize("messages", [[], None, {}, [{}], [[]], ["a"], "a"])
def test_chats_without_anything_are_refused(server: LocalServer, messages: Any) -> None:
    """31, vllm#7283."""
    body = {"model": MODEL, "messages": messages}
    assert refusal(post(server.url, CHAT, body))["param"] == "messages"


def test_a_turn_may_be_empty(server: LocalServer) -> None:
    """32, vllm#21089."""
    body = chat_body("abc")
    body["messages"][:0] = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": ""},
    ]
    assert answered(server, CHAT, body)["choices"][0]["message"]["content"] == "abc"


def test_a_template_that_refuses_a_role_is_quoted(tmp_path: Path) -> None:
    """34, sglang#892."""
    template = (
        "{%- for m in messages -%}{%- if m['role'] == 'system' -%}"
        "{{- raise_exception('System role not supported') -}}{%- endif -%}"
        "{{- '<|user|>' + m['content'] -}}{%- endfor -%}"
    )
    with LocalServer(make_folder(tmp_path / "m", template), ServingSettings(), ENGINE) as strict:
        body = chat_body("abc")
        body["messages"].insert(0, {"role": "system", "content": "be kind"})
        error = refusal(post(strict.url, CHAT, body))
        assert "System role not supported" in error["message"] and error["param"] == "messages"
        works(strict)


@pytest.mark.parametrize(
    "kwargs", [{"shout": 5}, {"shout": None}, "x", [1], 5, {"chat_template": "x"}, {"tools": []}]
)
def test_template_values_that_it_cannot_use_are_refused(server: LocalServer, kwargs: Any) -> None:
    """35, vllm PR#54022."""
    error = refusal(post(server.url, CHAT, chat_body("abc", chat_template_kwargs=kwargs)))
    assert error["param"] == "chat_template_kwargs"
    error = refusal(post(server.url, CHAT, chat_body("abc", chat_template="{{ 1 }}")))
    assert error["param"] == "chat_template"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"store": True}, "store"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"echo": "yes"}, "echo"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: LocalServer, fields: dict[str, Any], param: str
) -> None:
    error = refusal(post(server.url, TEXT, text_body("abc", **fields)))
    assert error["param"] == param and param in error["message"]


def test_fields_that_change_nothing_here_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "abc"}],
        user="me",
        metadata={"run": "7"},
        store=False,
        safety_identifier="x",
        prompt_cache_key="y",
        modalities=["text"],
        service_tier="flex",
        extra_body={"audio": None, "functions": None, "skip_special_tokens": True},
    )
    assert answer.choices[0].message.content == "abc"
    for fields in ({"modalities": ["text", "audio"]}, {"audio": {}}, {"functions": []}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "a"}], extra_body=fields
            )
        assert refused.value.param == next(iter(fields))


# Routes


def test_tokens_go_there_and_back(server: LocalServer) -> None:
    text = "the DEF 世 <|user|>"
    there = post(server.url, "/tokenize", {"model": MODEL, "prompt": text}).json()
    assert there["count"] == len(there["tokens"]) and there["max_model_len"] == 512
    assert there["token_strs"] is None and there["tokens"][0] == 259
    back = post(server.url, "/detokenize", {"model": MODEL, "tokens": there["tokens"]}).json()
    assert back == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "ab"}], "return_token_strs": True}
    found = post(server.url, "/tokenize", chat).json()
    assert found["tokens"] == [265, 97, 98, 266]
    assert found["token_strs"] == ["<|user|>", "a", "b", "<|assistant|>"]
    assert post(server.url, "/tokenize", {"prompt": ""}).json()["tokens"] == []
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/detokenize", {"tokens": [5_000]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {}),
    ):
        refusal(post(server.url, path, json.dumps(body).encode()))
    refusal(post(server.url, "/tokenize", {"model": "gpt", "prompt": "a"}), 404)


def test_every_refusal_is_an_error_object_with_its_status(server: LocalServer) -> None:
    """37, ray#64833: on every route."""
    for path in ("/nope", "/v1", "/v1/models/gpt", "/v1/models/"):
        assert refusal(httpx.get(server.url + path), 404)["type"] == "invalid_request_error"
    for route in ROUTES:
        other = "GET" if route.method == "post" else "POST"
        path = route.path.replace("{name}", MODEL)
        refusal(httpx.request(other, server.url + path), 405)
        if route.method == "post":
            refusal(post(server.url, path, b'{"model": '))
            unknown = {"model": "gpt", "prompt": "a", "tokens": [], "messages": [{}]}
            refusal(post(server.url, path, unknown), 400)
    assert httpx.get(f"{server.url}/v1/models/{MODEL}").json()["id"] == MODEL


def test_no_route_answers_a_senseless_body_with_a_server_error(server: LocalServer) -> None:
    """38, vllm#17038: on every route, described by itself."""
    bodies: list[bytes] = [
        b"[]",
        b'"x"',
        b"null",
        b"{}",
        b"",
        b"\xff",
        b"[" * 100_000,
        b"NaN",
        b"1",
    ]
    with httpx.Client(base_url=server.url) as http:
        for route in ROUTES:
            if route.body is None:
                continue
            for body in bodies:
                refusal(http.post(route.path, content=body))
            for name in route.body.model_fields:
                for value in ("\ud800", 1e308, -1, {}, [[]], [{}], True, "9" * 400, 2**70, [None]):
                    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
                    body |= {"model": MODEL, "tokens": [1], "max_tokens": 2}
                    body = {k: v for k, v in body.items() if k in route.body.model_fields}
                    if route.path == "/tokenize":
                        body.pop("messages")
                    content = json.dumps({**body, name: value}).encode()
                    response = http.post(route.path, content=content)
                    assert response.status_code < 500, (content, response.text)
                    if response.status_code >= 400:
                        refusal(response, response.status_code)
    works(server)


def test_the_description_tells_every_route_and_needs_nothing_from_elsewhere(
    server: LocalServer,
) -> None:
    document = httpx.get(server.url + "/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    told = {(m, path) for path, ops in document["paths"].items() for m in ops}
    assert told == {(route.method, route.path) for route in ROUTES}
    schemas = document["components"]["schemas"]
    refs = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert refs <= set(schemas)
    assert schemas["ChatRequest"]["additionalProperties"] is False
    page = httpx.get(server.url + "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "max_completion_tokens" in page.text
    for word in ("http:", "https:", "<script", "<link", "src=", "@import"):
        assert word not in page.text


def test_log_probabilities_of_prompts_are_bounded(server: LocalServer) -> None:
    with LocalServer(server._model_dir, ServingSettings(max_prompt_logprobs=60), ENGINE) as small:
        for prompt, count, path in (
            ("a" * 10, 5, TEXT),
            ("a" * 8, 5, CHAT),
            (["a" * 15] * 2, 1, TEXT),
        ):
            body = text_body(prompt) if path == TEXT else chat_body(prompt)
            answered(small, path, {**body, "prompt_logprobs": count, "max_tokens": 1})
            error = refusal(post(small.url, path, {**body, "prompt_logprobs": count + 1}))
            assert error["param"] == "prompt_logprobs" and "60" in error["message"]
        error = refusal(post(small.url, TEXT, text_body("a" * 11, echo=True, logprobs=5)))
        assert error["param"] == "logprobs"
