from __future__ import annotations

import json
import re
from typing import Any

import pytest

from core.errors import RequestError
from core.request import SamplingParams
from deployments.openai_schema import ChatRequest, CompletionRequest, parse_body
from deployments.settings import ServingSettings


def parsed(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "abc", **fields}
    return parse_body(CompletionRequest, json.dumps(body).encode())


def sampling(defaults: dict[str, float] | None = None, **fields: Any) -> SamplingParams:
    return parsed(**fields).sampling(3, 100, 50, defaults or {}, None)


def test_left_out_fields_come_from_the_models_defaults() -> None:
    defaults = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
    params = sampling(defaults, top_k=5)
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 5, 0.9)
    assert params.repetition_penalty == 1.1
    assert sampling().temperature == 1.0 and sampling(defaults, temperature=0).temperature == 0


def test_every_sampling_field_arrives() -> None:
    params = sampling(
        max_tokens=9,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        seed=-3,
        logit_bias={"7": -100},
        logprobs=2,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[4],
    )
    assert params == SamplingParams(
        max_tokens=9,
        temperature=1.0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        seed=-3,
        logit_bias=((7, -100.0),),
        logprobs=2,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(4,),
    )


def test_max_tokens_left_out_is_the_rest_of_the_context_or_the_cap() -> None:
    assert sampling().max_tokens == 97
    assert parsed().sampling(3, 100, 50, {}, 20).max_tokens == 20
    assert parsed().sampling(90, 100, 50, {}, 20).max_tokens == 10


def test_null_means_left_out() -> None:
    names = [name for name in CompletionRequest.model_fields if name not in ("model", "prompt")]
    assert parsed(**dict.fromkeys(names)) == parsed()


def test_content_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    request = parse_body(ChatRequest, json.dumps(body).encode())
    assert request.messages[0].for_template() == {"role": "user", "content": "a\nb"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"best_of": 0}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        sampling(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("stop", [["a"] * 17, [""], ["x" * 513]])
def test_stop_strings_have_limits(stop: list[str]) -> None:
    with pytest.raises(RequestError, match="stop strings"):
        parsed(stop=stop).stop_strings(ServingSettings())
    assert parsed(stop="end").stop_strings(ServingSettings()) == ("end",)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_token", "Did you mean max_tokens?"),
        ("temperatur", "Did you mean temperature?"),
        ("qqq", "Leave it out."),
    ],
)
def test_a_slip_is_told_the_nearest_field(name: str, advice: str) -> None:
    with pytest.raises(RequestError, match=re.escape(advice)) as refused:
        parse_body(CompletionRequest, json.dumps({"model": "m", "prompt": "x", name: 1}).encode())
    assert refused.value.param == name
