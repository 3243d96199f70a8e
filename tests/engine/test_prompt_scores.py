"""Log-probabilities of prompts: stock's own, however the prompt is cut, cached or preempted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.errors import RequestError
from core.request import Request, SamplingParams
from core.step import SequenceOutput, SequencePart, StepPlan, TokenLogprob
from engine.batcher import Batcher
from engine.engine import Engine
from engine.kv_pages import KvPages
from engine.limits import Limits
from engine.prompt_scores import StepLogits, max_scored_tokens
from engine.sequence import Sequence
from tests.engine.forced_steps import stock_logits, token_ids
from tests.engine.test_engine import run_all, tiny_engine, tokens_of

PROMPT = token_ids(77, 45)


def scored(
    name: str, prompt: tuple[int, ...] = PROMPT, n: int = 1, top: int = 3, **params: Any
) -> Request:
    chosen = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, **params}
    sampling = SamplingParams(prompt_logprobs=top, **chosen)
    return Request(request_id=name, prompt_ids=prompt, params=sampling, n=n)


def scores_of(outputs: list[SequenceOutput]) -> list[TokenLogprob]:
    return [score for output in outputs for score in output.prompt_logprobs]


def assert_stock(family: str, prompt: tuple[int, ...], scores: list[TokenLogprob]) -> None:
    expected = stock_logits(family, prompt).log_softmax(-1)[:-1]
    assert len(scores) == len(prompt) - 1
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([s.logprob for s in scores]), own, atol=2e-4, rtol=0)
    for row, score in zip(expected, scores, strict=True):
        values = torch.tensor([value for _, value in score.top])
        torch.testing.assert_close(values, row.topk(len(score.top)).values, atol=2e-4, rtol=0)
        told = torch.tensor([row[token] for token, _ in score.top])
        torch.testing.assert_close(values, told, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gemma4_text", "qwen3_next", "jamba"])
def test_scores_are_stocks_in_both_runners(family: str) -> None:
    """45 tokens in steps of 16: the parts' ends are scored like the rest."""
    engine = tiny_engine(family, dtype="float32")
    engine.add(scored("a"))
    engine.add(scored("b", token_ids(78, 20), max_tokens=1))
    found = run_all(engine)
    assert_stock(family, PROMPT, scores_of(found["a", 0]))
    assert_stock(family, token_ids(78, 20), scores_of(found["b", 0]))
    assert len(tokens_of(found["a", 0])) == 2
    engine.check_invariants()
    engine.close()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(dtype="float32")


def test_a_cached_prefix_is_scored_all_the_same(engine: Engine) -> None:
    plain = Request(
        request_id="plain", prompt_ids=PROMPT, params=SamplingParams(max_tokens=2, temperature=0.0)
    )
    engine.generate([plain])
    engine.add(scored("again"))
    outputs = run_all(engine)["again", 0]
    assert outputs[-1].cached_tokens == 0
    assert_stock("olmoe", PROMPT, scores_of(outputs))
    engine.add(plain)  # what a scored prompt computed is cached for others
    assert run_all(engine)["plain", 0][-1].cached_tokens == 44


def test_all_scores_come_by_the_first_token_and_once(engine: Engine) -> None:
    engine.add(scored("order", n=3, temperature=1.0, seed=5))
    found = run_all(engine)
    first = next(i for i, output in enumerate(found["order", 0]) if output.token_ids)
    assert len(scores_of(found["order", 0][: first + 1])) == len(PROMPT) - 1
    assert not scores_of(found["order", 0][first + 1 :])
    assert not scores_of(found["order", 1]) and not scores_of(found["order", 2])
    assert found["order", 2][-1].cached_tokens > 0


def test_a_prompt_is_scored_without_any_answer(engine: Engine) -> None:
    whole = token_ids(79, 128)  # all of the context
    for prompt in (whole, PROMPT, PROMPT[:1]):
        engine.add(scored("none", prompt, n=2, max_tokens=0))
        found = run_all(engine)
        for index in (0, 1):
            assert found["none", index][-1].finish_reason == "length"
            assert found["none", index][-1].completion_tokens == 0
            assert tokens_of(found["none", index]) == []
        assert len(scores_of(found["none", 0])) == len(prompt) - 1
    engine.check_invariants()
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


def test_scoring_changes_no_answer(engine: Engine) -> None:
    plain = Request(
        request_id="p", prompt_ids=PROMPT, params=SamplingParams(max_tokens=6, temperature=0.0)
    )
    expected = engine.generate([plain])["p"]
    assert engine.generate([scored("s", max_tokens=6, ignore_eos=False)])["s"] == expected


def test_a_prompt_preempted_halfway_is_scored_whole() -> None:
    engine = tiny_engine(dtype="float32", kv_memory="120KiB", max_step_tokens=4)
    # The old ones grow from 3 to 15 blocks while the young one's 10 fill a token a step.
    assert 16 <= engine.limits.kv_blocks < 25
    prompt = token_ids(80, 40)
    for number in range(3):
        params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        ids = token_ids(90 + number, 2)
        engine.add(Request(request_id=f"old {number}", prompt_ids=ids, params=params))
    engine.add(scored("young", prompt))
    outputs: list[SequenceOutput] = []
    halfway = False
    while engine.has_work():
        result = engine.step()
        halfway |= any(0 < s.scored < len(prompt) - 1 for s in engine._batcher.waiting)
        outputs += [output for output in result.outputs if output.request_id == "young"]
    assert halfway
    assert_stock("olmoe", prompt, scores_of(outputs))
    engine.check_invariants()
    engine.close()


def test_the_logits_of_a_step_are_bounded() -> None:
    assert max_scored_tokens(150_000, 2) == 447
    assert max_scored_tokens(10**9, 4) == 16


def test_a_prompt_that_is_too_long_to_be_scored_at_once_is_refused() -> None:
    limits = Limits(
        context_tokens=100,
        max_sequences=1,
        kv_blocks=9,
        kv_block_tokens=16,
        vocab_size=320,
        scored_tokens=44,
    )
    with pytest.raises(RequestError, match="at most 44 tokens") as refused:
        limits.check(scored("long"))
    assert refused.value.param == "prompt_logprobs"
    limits.check(scored("short", PROMPT[:44]))


def test_prompts_share_a_steps_room_for_scores() -> None:
    batcher = Batcher(KvPages(100, 4), 4, 64, max_scored_tokens=10)
    sequences = [Sequence(n, scored(str(n), token_ids(n, 16)), 0, None) for n in range(2)]
    for sequence in sequences:
        batcher.add(sequence)
    seen: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    while any(sequence.pending for sequence in sequences):
        batch = batcher.plan()
        rows = [part.scored[1] - part.scored[0] for part in batch.plan.parts]
        assert 0 < sum(rows) <= 10
        for part in batch.plan.parts:
            seen[part.sequence_id].append(part.scored)
        batcher.advance(batch)
        for sequence in [s for s in sequences if s.pending == 0 and s in batcher.running]:
            batcher.remove(sequence)
    assert seen == {0: [(0, 10), (10, 15)], 1: [(0, 5), (5, 15)]}


def test_rows_that_are_not_finite_give_no_scores() -> None:
    part = SequencePart(
        sequence_id=0,
        start=0,
        token_ids=(1, 2, 3),
        block_ids=(0,),
        is_decode=False,
        wants_logits=True,
        scored=(0, 2),
    )
    logits = torch.zeros(3, 8)
    request = scored("x", (1, 2, 3))
    plan = StepPlan(parts=(part,))
    (scores,) = StepLogits(plan, logits).scores([request]).values()
    assert scores is not None and len(scores) == 2
    logits[0, 0] = -torch.inf
    assert StepLogits(plan, logits).scores([request])[0] is not None
    logits[1, 5] = torch.nan
    assert StepLogits(plan, logits).scores([request]) == {0: None}
    assert torch.equal(StepLogits(plan, logits).sampled, logits[2:])
