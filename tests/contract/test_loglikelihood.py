"""Log-probabilities over HTTP, of the bundled model, are stock transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.settings import ServingSettings
from tests.serving.http_client import post
from tests.serving.local_server import MODEL, LocalServer

DEMO = Path(__file__).resolve().parents[2] / "demo_model"
ENGINE = {
    "dtype": "float32",
    "max_sequences": 4,
    "max_step_tokens": 16,
    "context_tokens": 256,
    "kv_memory": "8MiB",
    "scratch_memory": "16MiB",
}
TEXTS = (
    "A lighthouse is a tower that guides ships at night.",
    "Der Zug fährt um neun Uhr ab, und niemand wartet auf dich.",
    "def area(width, height):\n    return width * height\n",
)


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    factory = "engine.engine:open_engine"
    with LocalServer(DEMO, ServingSettings(), ENGINE, factory) as running:
        yield running


@pytest.fixture(scope="module")
def stock() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def ids_of(server: LocalServer, text: str) -> list[int]:
    return list(post(server.url, "/tokenize", {"prompt": text}).json()["tokens"])


def asked(server: LocalServer, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "seed": 1234, **fields}
    response = post(server.url, "/v1/completions", body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


def stock_logprobs(stock: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return stock(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lm_evals_loglikelihood_is_stocks(
    server: LocalServer, stock: torch.nn.Module, max_tokens: int
) -> None:
    """Prompts of token ids, in a list, with echo=true and logprobs=1; twice, so that the second
    finds its prompts in the prefix cache."""
    prompts = [ids_of(server, text) for text in TEXTS]
    for _ in range(2):
        choices = asked(server, prompts, echo=True, logprobs=1, max_tokens=max_tokens)
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        for text, ids, choice in zip(TEXTS, prompts, choices, strict=True):
            rows = stock_logprobs(stock, ids)[:-1]
            own = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            told = choice["logprobs"]["token_logprobs"]
            assert choice["text"].startswith(text) and told[0] is None
            # Also where the answer is nothing but its end, which is a token like others.
            assert len(told) == len(ids) + max_tokens
            torch.testing.assert_close(torch.tensor(told[1 : len(ids)]), own, atol=1e-3, rtol=0)
            # What lm-eval calls greedy: each token is the likeliest.
            greedy = [
                value == max(top.values())
                for value, top in zip(told, choice["logprobs"]["top_logprobs"], strict=True)
                if top is not None
            ]
            expected = (rows.argmax(-1) == torch.tensor(ids[1:])).tolist()
            assert greedy[: len(ids) - 1] == expected
            offsets = choice["logprobs"]["text_offset"]
            names = choice["logprobs"]["tokens"]
            for place, name in list(zip(offsets, names, strict=True))[: len(ids)]:
                if not name.startswith(("bytes:", "<")):
                    assert choice["text"][place : place + len(name)] == name


def test_an_echo_of_text_is_scored_like_its_ids(server: LocalServer) -> None:
    (by_text,) = asked(server, TEXTS[1], echo=True, logprobs=2, max_tokens=3)
    ids = ids_of(server, TEXTS[1])
    (by_ids,) = asked(server, ids, echo=True, logprobs=2, max_tokens=3)
    assert by_text == by_ids
    (plain,) = asked(server, TEXTS[1], logprobs=2, max_tokens=3)
    generated = by_text["logprobs"]["token_logprobs"][len(ids) :]
    assert by_text["text"] == TEXTS[1] + plain["text"]
    assert generated == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)


def test_n_answers_share_one_prompt(server: LocalServer) -> None:
    text = TEXTS[0] * 2
    body = {"model": MODEL, "prompt": text, "n": 3, "max_tokens": 4, "seed": 7, "temperature": 1.5}
    before = server.status()["prompt_tokens"]
    first = post(server.url, "/v1/completions", body).json()
    assert server.status()["prompt_tokens"] - before == first["usage"]["prompt_tokens"]
    again = post(server.url, "/v1/completions", body).json()
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) > 1
    assert texts == [choice["text"] for choice in again["choices"]]
    other = post(server.url, "/v1/completions", {**body, "seed": 8}).json()
    assert texts != [choice["text"] for choice in other["choices"]]


def test_scored_prompts_leave_nothing_behind(server: LocalServer) -> None:
    asked(server, [TEXTS[0]] * 6, echo=True, logprobs=0, max_tokens=0)
    status = server.status()
    assert (status["kv_used"], status["engine_running"]) == (0, 0)


def test_a_scored_prompt_may_ask_for_a_structure_too(server: LocalServer) -> None:
    for max_tokens in (0, 8):
        form = {"structured_outputs": {"choice": ["yes", "no"]}}
        (choice,) = asked(server, TEXTS[0], echo=True, logprobs=1, max_tokens=max_tokens, **form)
        answer = choice["text"].removeprefix(TEXTS[0])
        assert answer in (("yes", "no") if max_tokens else ("",))
        assert choice["logprobs"]["token_logprobs"][1] < 0
    scored = asked(server, TEXTS[0], prompt_logprobs=1, max_tokens=1)[0]["prompt_logprobs"]
    plain = asked(server, TEXTS[0], echo=True, logprobs=1, max_tokens=1)[0]["logprobs"]
    ids = ids_of(server, TEXTS[0])
    told = [entry[str(i)]["logprob"] for i, entry in list(zip(ids, scored, strict=True))[1:]]
    assert told == pytest.approx(plain["token_logprobs"][1 : len(ids)], abs=1e-4)
