"""Sampling: distributions, filters, penalties, and independence from the batch."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import SamplingParams
from engine.sampler import SamplingState, sample

VOCAB = 40


def state(seed: int = 0, prompt: tuple[int, ...] = (1,), ends: tuple[int, ...] = (), **params):
    return SamplingState(SamplingParams(**{"max_tokens": 100, **params}), prompt, ends, [seed])


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(row: torch.Tensor, count: int = 3000, **params) -> Counter[int]:
    states = [state(seed, **params) for seed in range(count)]
    return Counter(out.token_id for out in sample(row.expand(count, -1), states) if out)


def total_variation(found: Counter[int], expected: torch.Tensor) -> float:
    count = sum(found.values())
    return sum(abs(found[i] / count - float(expected[i])) for i in range(len(expected))) / 2


def test_greedy_takes_the_likeliest() -> None:
    rows = logits(0, 5)
    found = [out.token_id for out in sample(rows, [state(temperature=0)] * 5) if out]
    assert found == rows.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_follow_the_softmax_at_a_temperature(temperature: float) -> None:
    row = logits(1)
    expected = (row[0] / temperature).softmax(-1)
    assert total_variation(draw_many(row, temperature=temperature), expected) < 0.05


def test_top_k_keeps_the_k_likeliest_in_proportion() -> None:
    row = logits(2)
    keep = row[0].topk(3).indices
    expected = torch.zeros(VOCAB)
    expected[keep] = row[0][keep].softmax(-1)
    assert total_variation(draw_many(row, top_k=3), expected) < 0.05


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 0.999), st.sampled_from([0, 5]), st.booleans())
def test_top_p_keeps_the_smallest_set_that_reaches_it(seed, top_p, top_k, wide) -> None:
    vocab = 700 if wide else VOCAB  # wider than the candidates looked at first
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * (0.1 if wide else 2)
    probs = row.double().softmax(-1).sort(descending=True)
    values = probs.values[:top_k] if top_k else probs.values
    values = values / values.sum()
    reached = int((values.cumsum(-1) < top_p - 1e-9).sum()) + 1
    allowed = set(probs.indices[:reached].tolist())
    states = [state(s, top_p=top_p, top_k=top_k) for s in range(60)]
    drawn = {out.token_id for out in sample(row.expand(60, -1), states) if out}
    assert drawn <= allowed


def test_min_p_cuts_below_a_share_of_the_likeliest() -> None:
    row = logits(3)
    probs = row[0].softmax(-1)
    allowed = set(torch.nonzero(probs >= 0.3 * probs.max()).flatten().tolist())
    assert set(draw_many(row, count=1000, min_p=0.3)) == allowed


def test_a_seed_repeats_and_the_batch_does_not_matter() -> None:
    rows = logits(4, 6)

    def run(batches: list[list[int]]) -> list[list[int]]:
        states = [state(100 + i, temperature=1.0, top_p=0.9 if i % 2 else 1.0) for i in range(6)]
        found: list[list[int]] = [[] for _ in range(6)]
        for batch in batches:
            for i, out in zip(batch, sample(rows[batch], [states[i] for i in batch]), strict=True):
                assert out is not None
                found[i].append(out.token_id)
        return found

    together = run([[0, 1, 2, 3, 4, 5]] * 4)
    apart = run([[i] for _ in range(4) for i in range(6)])
    mixed = run([[5, 0], [1, 2, 3, 4]] * 4)
    assert together == apart == mixed
    assert any(len(set(tokens)) > 1 for tokens in together)


def test_bias_and_penalties_act_as_documented() -> None:
    row = torch.zeros((1, VOCAB))
    row[0, 3], row[0, 4], row[0, 5] = 2.0, 1.9, -1.0
    biased = sample(row, [state(temperature=0, logit_bias=((3, -100.0),))])
    assert biased[0] and biased[0].token_id == 4
    for penalty, drop in (("presence_penalty", 1.0), ("frequency_penalty", 2.0)):
        member = state(temperature=0, **{penalty: 1.0})
        member.accept(3)
        member.accept(3)
        edited = row[0].clone()
        member.edit(edited)
        assert edited[3] == pytest.approx(2.0 - drop)
        assert edited[4] == pytest.approx(1.9)
    member = state(temperature=0, prompt=(3, 5), repetition_penalty=2.0)
    edited = row[0].clone()
    member.edit(edited)
    assert (edited[3], edited[5], edited[4]) == (1.0, -2.0, pytest.approx(1.9))


def test_min_tokens_masks_what_would_end() -> None:
    row = torch.zeros((1, VOCAB))
    row[0, 7], row[0, 8] = 5.0, 4.0
    member = state(temperature=0, ends=(7,), min_tokens=1)
    first = sample(row, [member])[0]
    assert first and first.token_id == 8
    member.accept(8)
    second = sample(row, [member])[0]
    assert second and second.token_id == 7


def test_logprobs_are_the_models_own() -> None:
    row = logits(5)
    params = {"temperature": 0.3, "logit_bias": ((2, 50.0),), "logprobs": 4}
    out = sample(row, [state(**params)])[0]
    expected = row[0].log_softmax(-1)
    assert out and out.logprob and out.token_id == 2
    assert out.logprob.logprob == pytest.approx(float(expected[2]), abs=1e-5)
    best = expected.topk(4)
    assert [token for token, _ in out.logprob.top] == best.indices.tolist()
    assert [p for _, p in out.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    without = sample(row, [state(logprobs=0)])[0]
    assert without and without.logprob and without.logprob.top == ()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_harms_no_other(poison: float) -> None:
    rows = logits(6, 3)
    clean = sample(rows, [state(temperature=0)] * 3)
    rows[1, 9] = poison
    found = sample(rows, [state(temperature=0), state(temperature=1.0), state(temperature=0)])
    assert found[1] is None
    assert (found[0], found[2]) == (clean[0], clean[2])


def test_impossible_tokens_are_never_drawn() -> None:
    row = logits(7)
    row[0, 10:] = -math.inf
    assert max(draw_many(row, count=500, temperature=2.0)) < 10
