"""The bundled model behind Serve, with the official client: what a user does first."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serving.conftest import LiveApp
from tests.serving.http_client import leave_after

pytestmark = pytest.mark.serve

GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 12}
MESSAGES: list[Any] = [{"role": "user", "content": "What is a good name for a small shop? 你好"}]


@pytest.fixture(scope="module")
def client(demo_app: LiveApp) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_app.url + "/v1", api_key="none", max_retries=0, timeout=120)


def until_idle(app: LiveApp) -> None:
    deadline = time.monotonic() + 20
    names = ("running", "waiting", "engine_running", "engine_waiting", "kv_used")
    while any(app.status()[name] for name in names):
        assert time.monotonic() < deadline, app.status()
        time.sleep(0.05)


def test_only_the_rank_imports_torch(client: openai.OpenAI, demo_app: LiveApp) -> None:
    client.completions.create(prompt="Once", **GREEDY)
    assert demo_app.status()["torch_imported"] == 0
    assert demo_app.gateway_status()["torch_imported"] == 0


def test_chat_streamed_and_not_are_one_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    usage = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options=usage, **GREEDY
        )
    )
    text = "".join(choice.delta.content or "" for x in chunks for choice in x.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # The second request found the first one's prompt in the prefix cache.
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None and (details.cached_tokens or 0) > 0


def test_a_stop_string_cuts_the_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="Once upon a time", **GREEDY).choices[0].text
    stop = whole[4:7]
    cut = client.completions.create(prompt="Once upon a time", stop=[stop], **GREEDY).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_choices_and_seeds(client: openai.OpenAI) -> None:
    sampled = {"model": "demo", "prompt": "The", "max_tokens": 8, "temperature": 1.0}
    first = client.completions.create(n=3, seed=7, **sampled)
    again = client.completions.create(n=3, seed=7, **sampled)
    other = client.completions.create(n=3, seed=8, **sampled)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert texts != [choice.text for choice in other.choices] and len(set(texts)) > 1


def test_logprobs_and_bias(client: openai.OpenAI) -> None:
    """23, sglang#6171: a token biased by -100 is not sampled, greedy or not."""
    kind: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **GREEDY}
    answer = client.chat.completions.create(**kind).choices[0]
    assert answer.logprobs is not None and answer.logprobs.content is not None
    content = answer.logprobs.content
    joined = bytes(byte for token in content for byte in token.bytes or [])
    assert joined.decode(errors="replace") == answer.message.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in content)
    ids = {str(token): -100 for token in range(512)}
    biased = client.completions.create(prompt=[900, 901], logit_bias=ids, logprobs=0, **GREEDY)
    assert biased.choices[0].text


def test_a_prompt_above_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(prompt=[5] * 5000, **GREEDY)
    client.completions.create(prompt="fine", **GREEDY)


def test_many_at_once_and_clients_that_leave(client: openai.OpenAI, demo_app: LiveApp) -> None:
    """45 and 51: the KV blocks of clients that left are free, in prefill and decode alike."""
    body = {"model": "demo", "prompt": "Once upon a time " * 20, "max_tokens": 400}
    before = demo_app.status()
    with ThreadPoolExecutor(12) as pool:
        leaving = [
            pool.submit(leave_after, demo_app.url, "/v1/completions", body, None, 0.05 * number)
            for number in range(8)
        ]
        staying = [
            pool.submit(client.completions.create, prompt=f"Number {number}", **GREEDY)
            for number in range(12)
        ]
        for future in leaving:
            future.result()
        answers = [future.result() for future in staying]
    assert all(answer.choices[0].finish_reason for answer in answers)
    until_idle(demo_app)
    after = demo_app.status()
    assert after["failed"] == before["failed"] and after["remakes"] == before["remakes"]
