"""A report is few plain numbers, stays the same while nothing happens, and is refused if odd."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.replica_report import MOST_FLOATS, ReplicaReport, domain_hash

DOMAINS = ("code", "math", "law", "medicine", "news", "poetry", "chat", "science", "finance")
FULL = ReplicaReport(
    served_tokens=123_456,
    running=3,
    waiting=1,
    prompt_tokens=512,
    kv_free_tokens=1000,
    kv_tokens=4096,
    max_sequences=16,
    step_s=0.0123456,
    sequence_s=0.000123456,
    prefill_token_s=1.23456e-5,
    cold_token_s=0.0654321,
    hit_rate=0.98765,
    answer_tokens=123.456,
    domains={domain_hash(name): 0.1 + 0.0901 * i for i, name in enumerate(DOMAINS)},
)


def test_nine_domains_fit_into_32_plain_rounded_floats() -> None:
    numbers = FULL.to_floats()
    assert len(numbers) <= MOST_FLOATS == 32
    assert {type(number) for number in numbers} == {float}
    assert json.loads(json.dumps(numbers)) == numbers
    back = ReplicaReport.from_floats(numbers)
    assert back is not None
    assert set(back.domains) == set(FULL.domains), "no domain is left out"
    assert back.step_s == 0.0123 and back.cold_token_s == 0.0654 and back.hit_rate == 0.99
    assert (back.running, back.waiting) == (4, 0)
    assert back.to_floats() == numbers, "rounding twice changes nothing"
    assert ReplicaReport(ready=False).to_floats()[0] == -1.0
    lost = ReplicaReport.from_floats(ReplicaReport(ready=False).to_floats())
    assert lost is not None and not lost.ready


def test_of_many_domains_those_used_last_are_told_in_a_fixed_order() -> None:
    many = {domain_hash(f"d{i}"): 0.5 for i in range(12)}
    told = replace(FULL, domains=many).to_floats()
    back = ReplicaReport.from_floats(told)
    assert back is not None and set(back.domains) == {domain_hash(f"d{i}") for i in range(3, 12)}
    turned = dict(reversed(list(FULL.domains.items())))
    assert replace(FULL, domains=turned).to_floats() == FULL.to_floats()


def test_hashes_of_names_are_the_same_in_every_process() -> None:
    assert domain_hash("code") == 8042627
    assert len({domain_hash(name) for name in DOMAINS}) == len(DOMAINS)
    assert float(domain_hash("code")) == domain_hash("code")


def test_what_wobbles_below_the_last_digit_is_the_same_report() -> None:
    wobbled = replace(FULL, step_s=0.0123401, hit_rate=0.9899, answer_tokens=123.1)
    assert wobbled.to_floats() == FULL.to_floats()


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [1.0],
        [2.0, *FULL.to_floats()[1:]],
        FULL.to_floats()[:-1],
        [*FULL.to_floats(), 0.5, 0.5],
        [*FULL.to_floats()[:-1], 1.5],
        [*FULL.to_floats()[:-1], math.nan],
        [*FULL.to_floats()[:-1], math.inf],
        [*FULL.to_floats()[:3], -1.0, *FULL.to_floats()[4:]],
        [*FULL.to_floats()[:3], "3", *FULL.to_floats()[4:]],
        "text",
        None,
    ],
)
def test_what_makes_no_sense_is_no_report(numbers) -> None:
    assert ReplicaReport.from_floats(numbers) is None


@given(st.lists(st.floats() | st.integers() | st.text(), max_size=40))
def test_reading_never_raises(numbers) -> None:
    report = ReplicaReport.from_floats(numbers)
    assert report is None or report.sane


NAMES = [name for name in ReplicaReport.__dataclass_fields__ if name not in ("ready", "domains")]


@given(st.lists(st.floats(), min_size=len(NAMES), max_size=len(NAMES)))
def test_writing_never_raises_and_writes_finite_numbers(values) -> None:
    numbers = ReplicaReport(**dict(zip(NAMES, values, strict=True))).to_floats()
    assert all(math.isfinite(number) for number in numbers)
