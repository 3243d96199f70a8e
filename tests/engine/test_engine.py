"""The engine as its callers see it: requests in, outputs out, books balanced."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from core.errors import BudgetError, RequestError, SettingsError
from core.request import Request, SamplingParams
from core.step import SequenceOutput
from engine.batch_size import BatchLimit
from engine.engine import Engine, open_engine
from tests.models.families import cached_checkpoint

TINY = {
    "max_sequences": 4,
    "max_step_tokens": 16,
    "kv_block_tokens": 4,
    "kv_memory": "4MiB",
    "scratch_memory": "4MiB",
    "context_tokens": 128,
}


def tiny_engine(family: str = "olmoe", pool: Any = None, **changes: Any) -> Engine:
    return Engine.open(cached_checkpoint(family), engine={**TINY, **changes}, pool=pool)


def request(name: str, length: int = 10, seed: int = 0, n: int = 1, **params: Any) -> Request:
    generator = torch.Generator().manual_seed(seed + 1000 * length)
    prompt = torch.randint(5, 300, (length,), generator=generator).tolist()
    chosen = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **params}
    tenant = chosen.pop("tenant", "")
    return Request(
        request_id=name,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**chosen),
        n=n,
        tenant=tenant,
    )


def run_all(engine: Engine) -> dict[tuple[str, int], list[SequenceOutput]]:
    found: dict[tuple[str, int], list[SequenceOutput]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            found.setdefault((output.request_id, output.index), []).append(output)
    return found


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    opened = tiny_engine()
    yield opened
    opened.check_invariants()
    opened.close()


def test_each_request_gets_the_answer_it_gets_alone(engine: Engine) -> None:
    requests = [request(str(n), length) for n, length in enumerate((20, 33, 3, 1, 9, 40, 17))]
    together = engine.generate(requests)
    alone = {}
    for one in requests:
        alone |= engine.generate([one])
    assert together == alone
    assert list(together) == [str(n) for n in range(7)]
    engine.check_invariants()


def test_counts_and_gauges_of_a_run(engine: Engine) -> None:
    engine.add(request("counted", 40, seed=7))
    prefill = decode = 0
    outputs = []
    while engine.has_work():
        result = engine.step()
        prefill += result.stats.prefill_tokens
        decode += result.stats.decode_tokens
        outputs += result.outputs
        pairs = (result.stats.prefill_tokens + result.stats.decode_tokens) * 4 * 3
        assert result.stats.pool.routed_pairs == pairs
    assert (prefill, decode) == (40, 5)
    assert [o.completion_tokens for o in outputs] == [1, 2, 3, 4, 5, 6]
    assert [o.finish_reason for o in outputs] == [None] * 5 + ["length"]
    gauges = engine.gauges()
    assert (gauges.running, gauges.waiting, gauges.kv_blocks_used) == (0, 0, 0)
    assert gauges.kv_blocks_total == engine.limits.kv_blocks


def test_a_second_turn_reuses_the_first_ones_blocks(engine: Engine) -> None:
    first = request("turn 1", 21, seed=3)
    answer = engine.generate([first])["turn 1"][0]
    longer = Request(
        request_id="turn 2",
        prompt_ids=first.prompt_ids + tuple(answer) + (9, 9, 9),
        params=first.params,
    )
    engine.add(longer)
    reused = run_all(engine)["turn 2", 0]
    assert reused[0].cached_tokens == 24
    other = Request(
        request_id="other", prompt_ids=longer.prompt_ids, params=longer.params, tenant="x"
    )
    engine.add(other)
    fresh = run_all(engine)["other", 0]
    assert fresh[0].cached_tokens == 0
    assert tokens_of(fresh) == tokens_of(reused)


def test_n_sequences_share_the_prompt_and_differ_by_seed(engine: Engine) -> None:
    asked = Request(
        request_id="many",
        prompt_ids=request("x", 21, seed=5).prompt_ids,
        params=SamplingParams(max_tokens=8, temperature=1.5, seed=11, ignore_eos=True),
        n=3,
    )
    found = engine.generate([asked])["many"]
    assert len({tuple(tokens) for tokens in found}) == 3
    assert engine.generate([asked])["many"] == found
    single = Request(
        request_id="single",
        prompt_ids=asked.prompt_ids,
        params=asked.params,
    )
    assert engine.generate([single])["single"] == found[:1]


def test_without_prefix_cache_only_the_n_sequences_share() -> None:
    engine = tiny_engine(prefix_cache=False)
    for name in ("one", "two"):
        engine.add(request(name, 21, n=2))
    found = run_all(engine)
    cached = {key: outputs[0].cached_tokens for key, outputs in found.items()}
    assert cached == {("one", 0): 0, ("one", 1): 20, ("two", 0): 0, ("two", 1): 20}
    engine.check_invariants()
    engine.close()


def test_eos_and_stop_ids_end_and_are_not_part_of_the_text(engine: Engine) -> None:
    free = engine.generate([request("free", 12, max_tokens=8)])["free"][0]
    engine.add(request("stopped", 12, max_tokens=8, stop_token_ids=(free[3],)))
    outputs = run_all(engine)["stopped", 0]
    assert tokens_of(outputs) == free[:3]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].completion_tokens == 4
    engine.add(request("masked", 12, max_tokens=8, min_tokens=5, stop_token_ids=(free[3],)))
    masked = tokens_of(run_all(engine)["masked", 0])
    assert masked[:3] == free[:3]
    assert len(masked) >= 5 and masked[3] != free[3]


def test_preempted_sequences_answer_as_if_they_had_not_been() -> None:
    small = tiny_engine(kv_memory=engine_bytes(18))
    assert small.limits.kv_blocks == 18
    requests = [request(str(n), 12, seed=n, max_tokens=20) for n in range(4)]
    preemptions = 0
    tokens: dict[str, list[int]] = {}
    for one in requests:
        small.add(one)
    while small.has_work():
        result = small.step()
        preemptions += result.stats.preemptions
        for output in result.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert preemptions > 0
    small.check_invariants()
    small.close()
    large = tiny_engine()
    assert tokens == {name: found[0] for name, found in large.generate(requests).items()}
    large.close()


def engine_bytes(blocks: int) -> int:
    """kv_memory that holds so many blocks of the tiny olmoe: 3 layers x 4 heads x 16, fp32."""
    return blocks * 4 * 3 * 4 * 32 * 4


def test_what_can_never_run_is_refused_and_nothing_is_queued(engine: Engine) -> None:
    refused = [
        (request("long", 130), "130 tokens and max_tokens is 6; .* 128"),
        (request("endless", 10, max_tokens=10**9), "10 tokens and max_tokens is 1000000000"),
        (request("bias", logit_bias=((999_999, 5.0),)), "found 999999"),
        (request("stop", stop_token_ids=(-3,)), "found -3"),
        (
            Request(request_id="ids", prompt_ids=(5, 400), params=SamplingParams(max_tokens=1)),
            "found 400",
        ),
    ]
    for wrong, message in refused:
        with pytest.raises(RequestError, match=message):
            engine.add(wrong)
    engine.add(request("twice"))
    with pytest.raises(RequestError, match="running already"):
        engine.add(request("twice"))
    assert len(run_all(engine)) == 1


def test_a_step_that_raises_fails_its_sequences_and_the_loop_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.generate([request("before")])["before"]
    for name in ("a", "b"):
        engine.add(request(name, seed=40))
    engine.step()
    monkeypatch.setattr(engine._runner, "run", lambda plan: 1 / 0)
    outputs = engine.step().outputs
    monkeypatch.undo()
    assert {o.request_id: o.finish_reason for o in outputs} == {"a": "error", "b": "error"}
    assert all("division" in str(o.error) for o in outputs)
    assert not engine.has_work()
    engine.check_invariants()
    assert engine.generate([request("before")])["before"] == before


def test_memory_that_is_not_there_is_refused_at_start() -> None:
    with pytest.raises(BudgetError, match=r"need \d+ bytes, this machine has \d+ bytes"):
        tiny_engine(scratch_memory="1000TiB")
    with pytest.raises(BudgetError, match=r"needs 6144 bytes, engine\.kv_memory has 10 bytes"):
        tiny_engine(kv_memory=10)


@pytest.mark.parametrize("late", [False, True])
def test_a_refused_start_leaves_no_threads_and_no_open_files(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_engine().close()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    refused: dict[str, Any] = {} if late else {"context_tokens": 10**6}
    if late:
        monkeypatch.setattr("engine.engine.warm_up", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError if late else SettingsError):
        tiny_engine(**refused)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_pass_reserves_no_more_than_its_prompts_can_be() -> None:
    engine = tiny_engine(pool={"expert_memory": "60%"}, prefill_memory="1000TiB")
    assert len(engine.generate([request("long", 100)])["long"][0]) == 6
    engine.close()


@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "gemma4_text", "deepseek_v3"])
def test_families_of_every_kind_run_batched(family: str) -> None:
    engine = tiny_engine(family, pool={"expert_memory": "60%"}, context_tokens=64)
    requests = [request(str(n), length, n=2) for n, length in enumerate((20, 33, 1))]
    together = engine.generate(requests)
    alone = {}
    for one in requests:
        alone |= engine.generate([one])
    assert together == alone
    engine.check_invariants()
    assert not getattr(engine._runner, "sequence_ids", ())
    engine.close()


def test_a_step_says_how_it_was_sized_and_how_well_it_was_foreseen() -> None:
    engine = tiny_engine(max_step_tokens=64)
    engine.add(request("seen", 10, max_tokens=40))
    steps = []
    while engine.has_work():
        steps.append(engine.step().stats)
    assert [steps[0].kv_tokens, steps[1].kv_tokens, steps[2].kv_tokens] == [10, 11, 12]
    batches = [stats.batch for stats in steps]
    assert batches[0].reason == "probing"
    assert batches[0].predicted_s == 0.0
    assert 0.0 < batches[-1].predicted_s < 100 * steps[-1].step_s
    assert batches[-1].model_error > 0.0
    assert all(batch.sequences >= 1 and batch.held_s == 0.0 for batch in batches)
    engine.close()


@pytest.mark.parametrize("batching", ["dynamic", "fixed", "frugal"])
def test_the_answer_does_not_depend_on_how_batches_are_sized(batching: str) -> None:
    objectives = {"ttft_ms": 1.0, "tpot_ms": 0.5}
    for given in (None, objectives):
        engine = Engine.open(
            cached_checkpoint("olmoe"), {**TINY, "batching": batching}, None, given
        )
        found = engine.generate(
            [request(str(n), length, n=2) for n, length in enumerate((20, 33, 3, 9, 40, 17))]
        )
        engine.check_invariants()
        engine.close()
        assert found == _answers(), given


@functools.cache
def _answers() -> dict[str, list[list[int]]]:
    engine = tiny_engine()
    found: dict[str, list[list[int]]] = {}
    for n, length in enumerate((20, 33, 3, 9, 40, 17)):
        found |= engine.generate([request(str(n), length, n=2)])
    engine.close()
    return found


def test_what_is_cancelled_while_a_step_is_put_off_is_gone_at_once(monkeypatch) -> None:
    engine = tiny_engine(batching="frugal")
    engine.add(request("goes", max_tokens=40))
    engine.add(request("stays", max_tokens=4))
    engine.step()
    limit = BatchLimit(4, 16, 0.2, "gathering")
    monkeypatch.setattr(engine._sizer, "decide", lambda *_: limit)
    assert engine.hold_s() == 0.2
    time.sleep(0.01)
    engine.cancel("goes")
    assert engine.hold_s() == 0.0, "there is something to report"
    result = engine.step()
    assert [o.finish_reason for o in result.outputs if o.request_id == "goes"] == ["cancelled"]
    assert result.stats.batch.held_s >= 0.01
    while engine.has_work():
        engine.step()
    engine.check_invariants()
    engine.close()


def test_the_factory_takes_plain_settings() -> None:
    opened = open_engine(
        {"model": str(cached_checkpoint("mixtral")), "engine": TINY, "pool": {"policy": "lru"}}
    )
    assert opened.shape.model_type == "mixtral"
    assert opened.eos_ids == (2, 4)
    assert len(opened.generate([request("x")])["x"][0]) == 6
    opened.close()
