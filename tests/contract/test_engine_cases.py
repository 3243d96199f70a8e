"""Public bug reports against other engines, as cases for ours; numbers are the rows of our list."""

from __future__ import annotations

import random
from collections.abc import Iterator

import psutil
import pytest
import torch

from core.errors import RequestError
from engine.engine import Engine
from tests.engine.test_engine import engine_bytes, request, run_all, tiny_engine, tokens_of


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    opened = tiny_engine()
    yield opened
    opened.check_invariants()
    opened.close()


def assert_idle(engine: Engine) -> None:
    gauges = engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.kv_blocks_used) == (0, 0, 0)
    engine.check_invariants()


def test_a_banned_token_is_never_sampled(engine: Engine) -> None:
    """23, sglang#6171: logit_bias -100 on the greedy token."""
    free = engine.generate([request("free", 9)])["free"][0]
    bias = tuple((token, -100.0) for token in set(free))
    for name, temperature in (("greedy", 0.0), ("drawn", 2.0)):
        found = engine.generate([request(name, 9, temperature=temperature, logit_bias=bias)])
        assert len(found[name][0]) == 6
        assert not set(found[name][0]) & set(free)


def test_a_request_beyond_the_context_is_told_the_numbers(engine: Engine) -> None:
    """25, vllm#33418: max_tokens=10**9; a prompt longer than the context."""
    for wrong in (request("a", 10, max_tokens=10**9), request("b", 200, max_tokens=1)):
        with pytest.raises(RequestError) as refused:
            engine.add(wrong)
        for number in (len(wrong.prompt_ids), wrong.params.max_tokens, 128):
            assert str(number) in str(refused.value)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_cancelled_request_frees_its_blocks_within_a_step(engine: Engine, steps: int) -> None:
    """45, vllm#9428: the client leaves while the request waits, prefills, or decodes."""
    engine.add(request("left", 40, max_tokens=60))
    for _ in range(steps):
        engine.step()
    assert (engine.gauges().kv_blocks_used > 0) == (steps > 0)
    engine.cancel("left")
    assert engine.gauges().kv_blocks_used == 0
    outputs = engine.step().outputs
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("left", "cancelled")]
    assert not engine.has_work()
    assert_idle(engine)


def test_one_sequence_of_several_can_be_cancelled(engine: Engine) -> None:
    """45, where n=2: the other one goes on."""
    engine.add(request("pair", 10, n=2, max_tokens=5))
    engine.cancel("pair", 0)
    found = run_all(engine)
    assert found["pair", 0][-1].finish_reason == "cancelled"
    assert found["pair", 1][-1].finish_reason == "length"
    assert len(tokens_of(found["pair", 1])) == 5


def test_a_thousand_normal_requests_are_never_aborted(engine: Engine) -> None:
    """46, ATOM PR#1589: the abort counter stays 0."""
    dice = random.Random(0)
    for number in range(1000):
        engine.add(request(str(number), dice.randint(1, 6), max_tokens=dice.randint(1, 2)))
    reasons = [outputs[-1].finish_reason for outputs in run_all(engine).values()]
    assert reasons == ["length"] * 1000
    assert_idle(engine)


def test_three_hundred_requests_cancelled_at_once_leave_nothing(engine: Engine) -> None:
    """48, ray#52533: KV blocks used = 0, running = 0."""
    for number in range(300):
        engine.add(request(str(number), 1 + number % 30, max_tokens=20))
    for _ in range(3):
        engine.step()
    for number in range(300):
        engine.cancel(str(number))
    assert engine.gauges().kv_blocks_used == 0
    found = run_all(engine)
    assert len(found) == 300
    assert all(outputs[-1].finish_reason == "cancelled" for outputs in found.values())
    assert_idle(engine)


def test_after_a_cancel_storm_the_next_request_is_served() -> None:
    """49, ray#44644: one slot."""
    engine = tiny_engine(max_sequences=1)
    for number in range(40):
        engine.add(request(str(number), 20, max_tokens=20))
        if number % 3:
            engine.step()
        engine.cancel(str(number))
    engine.add(request("next", 12))
    assert len(tokens_of(run_all(engine)["next", 0])) == 6
    assert_idle(engine)
    engine.close()


def test_an_abort_during_prefill_is_harmless(engine: Engine) -> None:
    """51, LMCache#4185: cancelled between two parts of its prompt, twice, and unknown ids."""
    engine.add(request("long", 100, seed=9))
    other = request("other", 12, seed=9)
    engine.add(other)
    engine.step()
    for _ in range(2):
        engine.cancel("long")
    engine.cancel("never heard of")
    found = run_all(engine)
    assert found["long", 0][-1].finish_reason == "cancelled"
    assert [tokens_of(found["other", 0])] == engine.generate([other])["other"]


def test_a_prompt_that_needs_more_blocks_than_exist() -> None:
    """52, vllm#39734: refused, or ended where it outgrows them; a small one is served after it."""
    engine = tiny_engine(kv_memory=engine_bytes(8))
    assert engine.limits.kv_blocks == 8
    with pytest.raises(RequestError, match=r"33 tokens and max_tokens is 6; .* at most 32"):
        engine.add(request("nine blocks", 33))
    engine.add(request("grows", 30, max_tokens=20))
    engine.add(request("small", 5))
    found = run_all(engine)
    grown = found["grows", 0]
    assert grown[-1].finish_reason == "length"
    assert len(tokens_of(grown)) == 3
    assert len(tokens_of(found["small", 0])) == 6
    assert_idle(engine)
    engine.close()


def test_when_nothing_fits_the_loop_waits() -> None:
    """54, nano-vllm: no assertion while a request waits for blocks."""
    engine = tiny_engine(kv_memory=engine_bytes(8), prefix_cache=False)
    engine.add(request("first", 28, max_tokens=4))
    engine.add(request("second", 28, seed=1, max_tokens=4))
    waited = 0
    found = {}
    while engine.has_work():
        result = engine.step()
        waited += result.stats.waiting
        for output in result.outputs:
            found[output.request_id] = output.finish_reason
    assert waited > 3
    assert found == {"first": "length", "second": "length"}
    engine.close()


def test_two_batches_one_after_the_other_keep_their_order(engine: Engine) -> None:
    """57, transformers PR#45943: all results, in order."""
    for _ in range(2):
        batch = [request(f"{n}", 3 + n, seed=n) for n in range(9)]
        found = engine.generate(batch)
        assert list(found) == [str(n) for n in range(9)]
        assert all(len(tokens[0]) == 6 for tokens in found.values())


def test_two_interleaved_streams_lose_no_token(engine: Engine) -> None:
    """58, transformers PR#40479: the second begins while the first runs."""
    one, two = request("one", 10, seed=1, max_tokens=12), request("two", 17, seed=2, max_tokens=9)
    expected = {**engine.generate([one]), **engine.generate([two])}
    streams: dict[str, list[int]] = {"one": [], "two": []}
    engine.add(one)
    for step in range(100):
        if step == 4:
            engine.add(two)
        if step > 4 and not engine.has_work():
            break
        for output in engine.step().outputs:
            assert len(output.token_ids) <= 1
            streams[output.request_id] += output.token_ids
            assert output.completion_tokens == len(streams[output.request_id])
    assert {name: [tokens] for name, tokens in streams.items()} == expected


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_token_fails_its_request_alone(poison: float) -> None:
    """M8, vLLM#39391, sglang#30079: NaN or inf reaches the gates for one request's rows."""
    engine = tiny_engine(pool={"expert_memory": "60%"})
    with torch.inference_mode():
        engine._runner._model.get_input_embeddings().weight[303] = poison
    clean = request("clean", 14, max_tokens=10)
    expected = engine.generate([clean])
    bad = request("bad", 14, max_tokens=10)
    bad = type(bad)(
        request_id="bad", prompt_ids=(*bad.prompt_ids, 303, 7), params=bad.params, tenant=""
    )
    for one in (clean, bad, request("third", 9, seed=4)):
        engine.add(one)
    found = run_all(engine)
    assert found["bad", 0][-1].finish_reason == "error"
    assert found["bad", 0][-1].error_type == "RoutingError"
    assert tokens_of(found["bad", 0]) == []
    assert [tokens_of(found["clean", 0])] == expected["clean"]
    assert len(tokens_of(found["third", 0])) == 6
    assert_idle(engine)
    # Its blocks are used again, and carry nothing over.
    fills = [request("fill", 120, seed=seed, max_tokens=2) for seed in range(100, 200)]
    for fill in [fill for fill in fills if 303 not in fill.prompt_ids][:3]:
        assert engine.generate([clean]) == expected
        engine.generate([fill])
    engine.close()


def test_the_first_long_prefill_takes_no_new_memory() -> None:
    """M12, FreeToken#401: pages and scratch are there, written, from the start."""
    process = psutil.Process()
    before = process.memory_info().rss
    scratch = 96 * 1024**2
    engine = tiny_engine(
        scratch_memory=scratch, kv_memory="64MiB", max_step_tokens=128, max_sequences=32
    )
    started = process.memory_info().rss
    # Less what earlier tests of this process have left it to use again.
    assert started - before > 0.8 * scratch
    engine.generate([request("warm", 4)])
    warm = process.memory_info().rss
    pages = [tensor.data_ptr() for tensor in engine._runner.store.pages.values()]
    engine.generate([request("long", 120, max_tokens=8)])
    assert process.memory_info().rss - warm < 16 * 1024**2
    assert pages == [tensor.data_ptr() for tensor in engine._runner.store.pages.values()]
    engine.close()
