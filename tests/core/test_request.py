"""Requests and sampling parameters are coherent wherever an instance exists."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import RequestError
from core.request import Request, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("min_tokens", 11),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((5, 1e300),)),
        ("logit_bias", ((5, math.nan),)),
    ],
)
def test_a_value_out_of_range_is_refused_and_named(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{"max_tokens": 10, field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


@given(
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 10_000),
    seed=st.none() | st.integers(0, 2**63 - 1),
    bias=st.lists(st.tuples(st.integers(0, 10**6), st.floats(-100, 100)), max_size=5),
)
def test_a_request_crosses_the_wire_unchanged(temperature, top_p, top_k, seed, bias) -> None:
    params = SamplingParams(
        max_tokens=5,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        logit_bias=tuple(bias),
    )
    request = Request(request_id="a", prompt_ids=(1, 2), params=params, n=2, tenant="t")
    wire = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(wire, type=Request) == request


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one token"):
        Request(request_id="a", prompt_ids=(), params=SamplingParams(max_tokens=1))
