"""Public bug reports against other servers, as cases; numbers are the rows of our list.

Gateway, supervisor and rank are the product's; the engine emits forced ids, over real HTTP.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.errors import BudgetError
from deployments.settings import ServingSettings
from tests.serving import fake_engines
from tests.serving.http_client import DONE, events, leave_after, post
from tests.serving.local_server import MODEL, LocalServer
from tests.serving.tiny_model_folder import make_folder
from tests.waiting import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ENGINE = {"max_sequences": 4, "context_tokens": 4096, "kv_memory": 10_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    serving = ServingSettings(max_body_bytes="6MiB", max_queued_requests=2000)
    with LocalServer(folder, serving, ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def text_body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def chat_chunks(server: LocalServer, text: str, **fields: Any) -> list[dict[str, Any]]:
    response = post(server.url, CHAT, chat_body(text, stream=True, **fields))
    assert response.status_code == 200, response.text
    received = events(response.text)
    assert received[-1] == DONE and received.count(DONE) == 1
    for chunk in received[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return received[:-1]


def texts_of(chunks: list[dict[str, Any]]) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["delta"].get("content", "") for choice in choices]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


def works(server: LocalServer) -> None:
    response = post(server.url, TEXT, text_body("fine"))
    assert response.json()["choices"][0]["text"] == "fine"


# Text and streaming


def test_no_delta_holds_a_part_of_a_stop_string(server: LocalServer) -> None:
    """1, vllm#3574: the tokens cut across the stop string."""
    chunks = chat_chunks(server, "ABCDEFGHIJ", stop=["DEFGHIJ"])
    assert "".join(texts_of(chunks)) == "ABC"
    assert not any(letter in text for text in texts_of(chunks) for letter in "DEFGHIJ")
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_streamed_and_unstreamed_text_agree_for_any_stop_string(server: LocalServer) -> None:
    """2, vllm#2577: random stop strings; the reference is a search in the whole text."""
    chance = random.Random(2577)
    alphabet = "ab世é the DEF"
    with httpx.Client(base_url=server.url) as http:
        for _ in range(100):
            text = "".join(chance.choices(alphabet, k=30))
            begin = chance.randrange(30)
            found = text[begin : begin + chance.randint(1, 6)]
            stop = [found, "".join(chance.choices(alphabet, k=chance.randint(1, 3)))]
            body = text_body(text, stop=stop, seed=1)
            whole = http.post(TEXT, json=body).json()["choices"][0]["text"]
            received = events(http.post(TEXT, json={**body, "stream": True}).text)[:-1]
            assert "".join(chunk["choices"][0]["text"] for chunk in received) == whole
            ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
            assert whole == text[: min(ends)[1]]


def test_a_stop_string_that_never_occurs_leaves_the_full_text(server: LocalServer) -> None:
    """4, vllm#11089."""
    assert "".join(texts_of(chat_chunks(server, "the DEF", stop=["DEFX", "EFEF"]))) == "the DEF"


def test_only_generated_text_is_returned(server: LocalServer) -> None:
    """5, vllm#48853: the prompt ids end inside a multi-byte character."""
    cut = list("prompt 世".encode())[:-1]
    text = post(server.url, TEXT, text_body(cut, max_tokens=3)).json()["choices"][0]["text"]
    assert text == "pro"
    # A first byte that continues the prompt's character completes it, and nothing before it.
    body = text_body([*b"lead ", fake_engines.USER, 0x96, 0x41, 0xE4, 0xB8], max_tokens=2)
    assert post(server.url, TEXT, body).json()["choices"][0]["text"] == "世A"


def test_text_held_back_is_flushed_at_the_end(server: LocalServer) -> None:
    """7, mini-sglang: max_tokens ends inside a multi-byte character."""
    body = text_body("ab世", max_tokens=4)
    whole = post(server.url, TEXT, body).json()["choices"][0]
    received = events(post(server.url, TEXT, {**body, "stream": True}).text)[:-1]
    assert whole["finish_reason"] == "length"
    assert whole["text"] == "".join(chunk["choices"][0]["text"] for chunk in received)
    assert whole["text"] == "ab世".encode()[:4].decode(errors="replace")


def test_an_engine_error_ends_a_stream_with_one_error_frame(server: LocalServer) -> None:
    """8, vllm#52852: the engine raises at token 3."""
    body = chat_body("abcdef", stream=True, seed=fake_engines.RAISE_AT_TOKEN_3)
    received = events(post(server.url, CHAT, body).text)
    errors = [event for event in received if event != DONE and "error" in event]
    assert len(errors) == 1 and received[-2] is errors[0]
    assert received[-1] == DONE and received.count(DONE) == 1
    assert errors[0]["error"]["code"] == "routing_failed"
    unstreamed = post(server.url, CHAT, {**body, "stream": False})
    assert refusal(unstreamed, 500)["message"] == "the router produced NaN"
    works(server)


def test_three_choices_end_with_one_mark_and_one_finish_each(server: LocalServer) -> None:
    """10, vllm PR#378, and 11, vllm#2266."""
    chunks = chat_chunks(server, "abc", n=3)
    finished = [c["index"] for x in chunks for c in x["choices"] if c["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    for index in range(3):
        mine = [c for x in chunks for c in x["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "abc"
        assert mine[0]["delta"]["role"] == "assistant"


def test_finish_reasons(client: openai.OpenAI) -> None:
    """13, sglang#4550."""
    ended = client.completions.create(model=MODEL, prompt="abc")
    assert ended.choices[0].finish_reason == "stop"
    cut = client.completions.create(model=MODEL, prompt="abc", max_tokens=1)
    assert (cut.choices[0].finish_reason, cut.choices[0].text) == ("length", "a")


# Parameters, usage, log-probabilities


def test_usage_comes_last_and_is_null_before(server: LocalServer) -> None:
    """15, vllm#6371, and 16, vllm#7262."""
    chunks = chat_chunks(server, "abc", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in chat_chunks(server, "abc"))


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    """18, vllm#4795."""
    messages = [{"role": "user", "content": "abc"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert [token.token for token in content] == ["a", "b", "c"]
    assert all(token.top_logprobs == [] for token in content)


def test_logprob_bytes_join_to_the_text(client: openai.OpenAI) -> None:
    """19, vllm#19177: each token is a third of a Chinese character."""
    messages = [{"role": "user", "content": "世界 the"}]
    kind = {"model": MODEL, "messages": messages, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**kind)
    content = answer.choices[0].logprobs.content
    assert bytes(b for token in content for b in token.bytes).decode() == "世界 the"
    assert len(content) == 7 and all(len(token.top_logprobs) == 2 for token in content)
    streamed = [
        token
        for chunk in client.chat.completions.create(**kind, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or []
    ]
    assert bytes(b for token in streamed for b in token.bytes).decode() == "世界 the"


def test_too_many_alternatives_are_refused(server: LocalServer) -> None:
    """21, sglang#40076."""
    body = chat_body("abc", logprobs=True, top_logprobs=1_000_000)
    assert refusal(post(server.url, CHAT, body))["param"] == "top_logprobs"
    works(server)


@pytest.mark.parametrize("bias", [{"999999": 5}, {"5": 1e300}, {"x": 1}, {"-1": 1}, {"٣": 1}])
def test_senseless_logit_bias_is_refused(server: LocalServer, bias: dict[str, float]) -> None:
    """22, vllm PR#16529."""
    body = chat_body("abc", logit_bias=bias)
    assert refusal(post(server.url, CHAT, body))["param"] == "logit_bias"


def test_lengths_beyond_the_context_are_refused_in_numbers(server: LocalServer) -> None:
    """25, vllm#33418."""
    error = refusal(post(server.url, TEXT, text_body("abc", max_tokens=10**9)))
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    for number in ("3", "1000000000", "4096"):
        assert number in error["message"]
    error = refusal(post(server.url, CHAT, chat_body("x" * 5000)))
    assert "5002" in error["message"] and "4096" in error["message"]
    assert error["param"] == "messages"
    works(server)


def test_max_tokens_left_out_is_what_the_context_leaves(server: LocalServer) -> None:
    """26, vllm#6707."""
    prompt = "ab" * 2000
    choice = post(server.url, TEXT, text_body(prompt, ignore_eos=True)).json()["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"]) == (96, "length")


def test_absurd_counts_are_refused_fast(server: LocalServer) -> None:
    """27, vllm PR#51447."""
    for extra in ({"stop": ["a"] * 500_000}, {"n": 100_000}, {"stop": ["a" * 100_000]}):
        body = json.dumps(chat_body("abc", **extra)).encode()
        began = time.monotonic()
        refusal(post(server.url, CHAT, body))
        assert time.monotonic() - began < 2.0
    works(server)


# Requests and templates


@pytest.mark.parametrize(
    ("path", "body"),
    [(TEXT, text_body("")), (TEXT, text_body([])), (CHAT, {"model": MODEL, "messages": []})],
)
def test_empty_prompts_are_refused(server: LocalServer, path: str, body: dict[str, Any]) -> None:
    """31, vllm#7283."""
    refusal(post(server.url, path, body))


def test_an_empty_assistant_turn_is_accepted(server: LocalServer) -> None:
    """32, vllm#21089."""
    body = chat_body("abc")
    body["messages"][:0] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": ""},
    ]
    answer = post(server.url, CHAT, body).json()
    assert answer["choices"][0]["message"]["content"] == "abc"


def test_a_template_that_raises_is_a_refusal_with_its_message(server: LocalServer) -> None:
    """34, sglang#892."""
    body = chat_body("abc")
    body["messages"][0] |= {"role": "tool", "tool_call_id": "x"}
    assert "tools are not for this model" in refusal(post(server.url, CHAT, body))["message"]


@pytest.mark.parametrize("kwargs", [{"shout": 5}, "x", {"messages": []}, {"tools": {}}, [1]])
def test_bad_template_arguments_are_refused(server: LocalServer, kwargs: Any) -> None:
    """35, vllm PR#54022."""
    error = refusal(post(server.url, CHAT, chat_body("abc", chat_template_kwargs=kwargs)))
    assert error["param"] == "chat_template_kwargs"


def test_every_refusal_has_the_envelope_and_the_right_status(server: LocalServer) -> None:
    """37, ray#64833."""
    refusal(post(server.url, CHAT, {"model": MODEL, "messages": {}}))
    unknown = refusal(post(server.url, CHAT, {**chat_body("a"), "model": "gpt"}), 404)
    assert (unknown["code"], unknown["param"]) == ("model_not_found", "model")
    refusal(httpx.get(server.url + "/nope"), 404)
    refusal(httpx.get(server.url + "/v1/models/gpt"), 404)
    refusal(httpx.get(server.url + CHAT), 405)
    refusal(post(server.url, CHAT, b'{"model": '))
    named = refusal(post(server.url, CHAT, chat_body("a", top_a=1, frobnicate=1)))
    assert "top_a" in named["message"] and "frobnicate" in named["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_no_body_makes_a_server_error(server: LocalServer, path: str) -> None:
    """38, vllm#17038: wrong kinds, deep nesting, bytes that are no text, broken Unicode."""
    bodies: list[bytes] = [b"[]", b'"x"', b"null", b"{}", b"", b"\xff\xfe", b"[" * 200_000, b"NaN"]
    for value in ('"\\ud800"', "1e999", "-1", "{}", "[[]]", "null", "true", "9" * 400):
        fields = ("prompt", "messages", "temperature", "max_tokens", "stop", "n", "seed", "model")
        for name in (*fields, "logit_bias", "stop_token_ids", "stream_options", "top_logprobs"):
            body = {**text_body("a"), **chat_body("a")}
            body.pop("messages" if path == TEXT else "prompt")
            body["max_tokens"] = 2
            body[name] = "MARK"
            bodies.append(json.dumps(body).replace('"MARK"', value).encode())
    with httpx.Client(base_url=server.url) as http:
        for body in bodies:
            response = http.post(path, content=body)
            assert response.status_code < 500, (body[:200], response.text)
            if response.status_code >= 400:
                refusal(response, response.status_code)
    works(server)


def test_bytes_in_headers_that_are_no_text_do_no_harm(server: LocalServer) -> None:
    """40, Ray LLM (the proxy's part is tested live)."""
    headers = {"x-request-id": b"\xff"}
    assert post(server.url, TEXT, text_body("a"), headers=headers).status_code in (200, 400)


def test_headers_that_would_switch_cancellation_off_are_refused(server: LocalServer) -> None:
    for name in ("x-request-disconnect-disabled", "x-request-timeout-seconds"):
        error = refusal(post(server.url, TEXT, text_body("a"), headers={name: "?1"}))
        assert name in error["message"]


# Cancellation and capacity


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(server: LocalServer, stream: bool) -> None:
    """45, vllm#9428."""
    body = text_body("ab" * 20, seed=fake_engines.SLOW_MS + 20, max_tokens=4000, stream=stream)
    before = server.status()
    leave_after(server.url, TEXT, body, b"data: " if stream else None, linger_s=0.2)
    until(lambda: server.status()["aborted"] == before["aborted"] + 1)
    steps = server.status()["steps"]
    until(lambda: server.status()["kv_used"] == 0 and server.status()["engine_running"] == 0)
    status = server.status()
    assert status["running"] == 0 and status["steps"] - steps <= 2


def test_normal_requests_are_no_aborts(server: LocalServer) -> None:
    """46, ATOM PR#1589."""
    before = server.status()
    with httpx.Client(base_url=server.url) as http:
        for number in range(200):
            body = text_body("ab", stream=bool(number % 2))
            assert http.post(TEXT, json=body).status_code == 200
    after = server.status()
    assert after["aborted"] == before["aborted"]
    assert after["completed"] == before["completed"] + 200


@pytest.mark.parametrize("stop", [["b"], None])
def test_choices_ended_by_a_stop_string_leave_nothing(server: LocalServer, stop: Any) -> None:
    body = text_body("ab" * 8, n=3, seed=fake_engines.SLOW_MS, max_tokens=400, stop=stop)
    answer = post(server.url, TEXT, body).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} == {
        "stop" if stop else "length"
    }
    assert answer["usage"]["completion_tokens"] == (5 if stop else 1200)
    until(lambda: server.status()["kv_used"] == 0 and server.status()["engine_running"] == 0)


def test_a_choice_that_ends_early_frees_its_place_alone(server: LocalServer) -> None:
    body = text_body("a" + "b" * 60, n=2, seed=fake_engines.SLOW_MS + 20, stop=["a"])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server.url, TEXT, {**body, "max_tokens": 400})
        until(lambda: server.status()["engine_running"] == 1)
        assert not answer.done()
        choices = answer.result().json()["choices"]
    assert [choice["text"] for choice in choices] == ["", "b" * 60]
    until(lambda: server.status()["engine_running"] == 0)


def test_a_cancel_storm_on_one_slot_leaves_it_free(folder: Path) -> None:
    """49, ray#44644."""
    with LocalServer(folder, ServingSettings(), {**ENGINE, "max_sequences": 1}) as small:
        body = text_body("ab", seed=fake_engines.SLOW_MS + 5, max_tokens=4000, stream=True)
        for _ in range(50):
            leave_after(small.url, TEXT, body, None)
        works(small)
        until(lambda: small.status()["kv_used"] == 0 and small.status()["running"] == 0)


def test_a_cancel_storm_leaves_nothing_behind(server: LocalServer) -> None:
    """48, ray#52533: 300 requests, all cancelled."""
    before = server.status()
    body = text_body("ab" * 20, seed=fake_engines.SLOW_MS + 5, max_tokens=4000, stream=True)
    for _ in range(300):
        leave_after(server.url, TEXT, body, None)
    works(server)

    def idle() -> bool:
        status = server.status()
        gauges = ("running", "waiting", "waiting_prompt_tokens", "engine_running", "kv_used")
        return all(status[name] == 0 for name in gauges)

    until(idle, 20)
    assert server.status()["failed"] == before["failed"]


def test_a_prompt_above_the_kv_pool_is_refused_and_a_small_one_served(folder: Path) -> None:
    """52, vllm#39734: a pool of 8 blocks, a prompt that needs 9."""
    engine = {**ENGINE, "kv_memory": 8}
    with LocalServer(folder, ServingSettings(), engine) as small:
        error = refusal(post(small.url, TEXT, text_body("a" * 140)))
        assert "KV blocks" in error["message"]
        works(small)


def test_a_full_queue_is_a_503_that_says_when_to_come_back(folder: Path) -> None:
    """69, ray#51145: one place to wait."""
    serving = ServingSettings(max_queued_requests=1)
    with LocalServer(folder, serving, {**ENGINE, "max_sequences": 1}) as small:
        body = text_body("ab", seed=fake_engines.SLOW_MS + 20, max_tokens=40)
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(lambda _: post(small.url, TEXT, body), range(10)))
        codes = sorted(answer.status_code for answer in answers)
        assert set(codes) == {200, 503} and codes.count(200) >= 4
        for answer in answers:
            if answer.status_code == 503:
                assert refusal(answer, 503)["code"] == "overloaded"
                assert 1 <= int(answer.headers["retry-after"]) <= 120
        works(small)


def test_two_interleaved_streams_survive_a_drain(folder: Path) -> None:
    """58, transformers PR#40479: no token lost, and the drain ends within its limit."""
    with LocalServer(folder, ServingSettings(), ENGINE) as small, ThreadPoolExecutor(3) as pool:
        body = text_body("xyz", seed=fake_engines.SLOW_MS + 10, max_tokens=60, stream=True)
        streams = [pool.submit(post, small.url, TEXT, body) for _ in range(2)]
        until(lambda: small.status()["engine_running"] == 2)
        began = time.monotonic()
        small.call(small.supervisor.drain(10.0))
        assert time.monotonic() - began < 5
        for stream in streams:
            received = events(stream.result().text)[:-1]
            text = "".join(chunk["choices"][0]["text"] for chunk in received)
            assert text == "xyz" * 20
        assert refusal(post(small.url, TEXT, text_body("a")), 503)


def test_a_drain_ends_long_streams_with_an_error_frame(folder: Path) -> None:
    with LocalServer(folder, ServingSettings(), ENGINE) as small, ThreadPoolExecutor(1) as pool:
        body = text_body("xyz", seed=fake_engines.SLOW_MS + 20, max_tokens=4000, stream=True)
        stream = pool.submit(post, small.url, TEXT, body)
        until(lambda: small.status()["engine_running"] == 1)
        small.call(small.supervisor.drain(0.3))
        received = events(stream.result().text)
        assert "error" in received[-2] and received[-1] == DONE


# Shapes, held against the official types


def test_responses_match_the_official_types(server: LocalServer) -> None:
    chat = post(server.url, CHAT, chat_body("abc", logprobs=True, top_logprobs=1, n=2)).json()
    assert len(ChatCompletion.model_validate(chat, strict=True).choices) == 2
    text = post(server.url, TEXT, text_body("abc", logprobs=2)).json()
    parsed = Completion.model_validate(text, strict=True)
    assert parsed.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert parsed.choices[0].logprobs.tokens[-1] == "<|end|>"
    received = events(post(server.url, TEXT, text_body("abc", logprobs=1, stream=True)).text)
    for chunk in received[:-1]:
        # The type knows no null here, the API sends it in every chunk but the last.
        choice = chunk["choices"][0]
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate({**chunk, "choices": [choice]}, strict=True)


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    usage = client.completions.create(model=MODEL, prompt="a" * 40).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (40, 16)


def test_a_body_above_the_limit_is_413(server: LocalServer) -> None:
    assert refusal(post(server.url, TEXT, b" " * (7 * 1024**2)), 413)["code"] == "body_too_large"


def test_a_broken_engine_fails_the_start_with_its_own_error(folder: Path) -> None:
    factory = "tests.serving.fake_engines:open_broken_engine"
    with (
        pytest.raises(BudgetError, match="100 bytes"),
        LocalServer(folder, ServingSettings(), ENGINE, factory),
    ):
        pass


def test_a_step_that_ends_the_rank_fails_its_requests_and_the_next_is_served(
    server: LocalServer,
) -> None:
    before = server.status()
    body = text_body("abcdef", seed=fake_engines.STEP_RAISES)
    assert refusal(post(server.url, TEXT, body), 503)["code"] == "engine_unavailable"
    works(server)
    assert server.status()["remakes"] == before["remakes"] + 1
