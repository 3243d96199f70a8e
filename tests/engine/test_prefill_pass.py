"""Long prompts pass layer by layer while experts are not all resident, and decoding goes on."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import Request
from core.step import SequencePart, StepPlan, StepResult
from engine.batcher import Batch, Batcher
from engine.engine import Engine
from engine.kv_pages import KvPages
from engine.prefill_pass import activation_bytes
from expert_pool.predictors import PROMPT_FIRST_TOKENS
from tests.contract.test_pool_cases import PeakBytes
from tests.engine.test_batcher import BLOCK, sequence
from tests.engine.test_engine import TINY, request, run_all, tiny_engine, tokens_of
from tests.models.families import cached_checkpoint

LEAST = {"expert_memory": "60%", "prefetch": "off", "host_memory": "off", "hot_start_s": 0}


def offloaded(family: str = "olmoe", **changes: Any) -> Engine:
    return tiny_engine(family, pool=LEAST, prefix_cache=False, **changes)


def prompt_tokens(engine: Engine) -> int:
    return engine._batcher._pass_tokens


@pytest.fixture
def engine():
    opened = offloaded()
    yield opened
    opened.check_invariants()
    opened.close()
    assert not passes_under_way()


def begin_pass(engine: Engine, *requests: Request) -> StepResult:
    for one in requests:
        engine.add(one)
    result = engine.step()
    assert engine._turns._pass is not None
    return result


def passes_under_way() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefill-pass"]


def test_decoding_goes_on_during_a_pass(engine: Engine) -> None:
    layers = len(engine.shape.moe_layers)
    engine._turns._clock = itertools.count().__next__  # each slice seems as long as a step
    alone = engine.generate([request("long", 90)])["long"][0]
    engine.add(request("short", 4, max_tokens=40))
    engine.step()
    engine.step()
    begin_pass(engine, request("long", 90))
    between = slices = 0
    first: list[int] = []
    while not first:
        result = engine.step()
        short = [t for o in result.outputs if o.request_id == "short" for t in o.token_ids]
        first = [t for o in result.outputs if o.request_id == "long" for t in o.token_ids]
        between += len(short)
        slices += not short
        assert bool(result.stats.prefill_tokens) == bool(first)
    assert between >= layers
    assert between <= slices <= between + 2
    rest = run_all(engine)
    assert first + tokens_of(rest["long", 0]) == alone


@pytest.mark.parametrize("prefetch", ["on", "off"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_the_answer_is_that_of_steps_with_everything_resident(family: str, prefetch: str) -> None:
    resident = tiny_engine(family)
    offload = tiny_engine(family, pool={**LEAST, "prefetch": prefetch})
    requests = [request(str(n), length) for n, length in enumerate((60, 70, 3, 30))]
    assert offload.generate(requests) == resident.generate(requests)
    for engine in (resident, offload):
        engine.check_invariants()
        engine.close()


def test_the_prompts_of_a_pass_are_known_to_the_steps_that_follow() -> None:
    engine = tiny_engine("olmoe", pool={**LEAST, "prefetch": "on"})
    long = request("long", 100, max_tokens=4)
    engine.generate([long])
    assert engine.pool.read_ahead is not None
    first_ids = engine.pool.read_ahead.prefetcher.forecaster._first_ids
    assert list(first_ids.values()) == [tuple(long.prompt_ids[:PROMPT_FIRST_TOKENS])]
    engine.close()


def test_a_pass_reads_each_expert_once_where_steps_read_it_for_each_part() -> None:
    read = {}
    for prefill_memory in ("256MiB", 0):
        engine = offloaded(prefill_memory=prefill_memory)
        engine.add(request("long", 100, max_tokens=1))
        read[prefill_memory] = 0
        while engine.has_work():
            read[prefill_memory] += engine.step().stats.pool.records_read
        experts = sum(layer.num_experts for layer in engine.shape.moe_layers)
        engine.close()
    assert read["256MiB"] <= experts
    assert read[0] > 1.5 * experts


def test_longer_prompts_take_several_passes_and_many_prompts_share_one(engine: Engine) -> None:
    few = offloaded(prefill_memory=60 * activation_bytes(engine._runner._model))
    passes: list[StepPlan] = []
    run = few._runner.run

    def note(plan: StepPlan) -> torch.Tensor:
        passes.extend([plan] if plan.layer_major else [])
        return run(plan)

    few._runner.run = note  # type: ignore[method-assign]
    few.generate([request("longer", 110, max_tokens=2)])
    assert [plan.num_tokens for plan in passes] == [60, 50]
    passes.clear()
    few.generate([request(str(n), 18, seed=n, max_tokens=2) for n in range(3)])
    assert [[len(part.token_ids) for part in plan.parts] for plan in passes] == [[18, 18, 18]]
    few.check_invariants()
    few.close()


@pytest.mark.parametrize("family", ["olmoe", "nemotron_h"])
def test_a_cancelled_sequence_frees_its_blocks_at_once_and_others_begin_again(family: str) -> None:
    engine = offloaded(family)
    alone = engine.generate([request("stays", 40)])["stays"][0]
    begin_pass(engine, request("goes", 50), request("stays", 40))
    engine.step()
    used = engine._pages.used
    engine.cancel("goes")
    assert engine._turns._pass is None
    assert engine._pages.used < used
    cancelled, *_ = begin_pass(engine, request("late", 60)).outputs
    assert (cancelled.request_id, cancelled.finish_reason) == ("goes", "cancelled")
    assert engine._turns._pass.batch.plan.num_tokens == 40, "who was broken off goes first, alone"
    outputs = run_all(engine)
    assert tokens_of(outputs["stays", 0]) == alone
    assert len(tokens_of(outputs["late", 0])) == 6
    engine.check_invariants()
    engine.close()


def test_a_pass_takes_half_of_the_time_where_others_decode(engine: Engine) -> None:
    now = 0.0
    engine._turns._clock = lambda: now
    engine.add(request("short", 4, max_tokens=100))
    engine.step()
    begin_pass(engine, request("long", 90))
    took = {"step": 0.0, "slice": 0.0}
    run = engine._runner.run
    collect = engine.pool.collect

    def run_slowly(plan: StepPlan) -> torch.Tensor:
        nonlocal now
        logits = run(plan)
        if not plan.layer_major:
            now += 4.0
            took["step"] += 4.0
        return logits

    def collect_slowly(wait: bool) -> list[Any]:
        nonlocal now
        if threading.current_thread().name == "prefill-pass" and not wait:
            now += 1.0
            took["slice"] += 1.0
        return collect(wait)

    engine._runner.run = run_slowly  # type: ignore[method-assign]
    engine.pool.collect = collect_slowly  # type: ignore[method-assign]
    pieces = 0
    while engine._turns._pass is not None:
        engine.step()
        pieces += 1
    assert took["slice"] > 8
    # Each slice lasts as long as a step, give or take a read; the last one may be cut short.
    assert abs(took["step"] - took["slice"]) <= 4 + pieces
    run_all(engine)


def test_what_a_pass_raises_fails_the_sequences_in_it_and_no_other(engine: Engine) -> None:
    engine.add(request("short", 4, max_tokens=20))
    engine.step()
    layer = engine._runner._model.get_submodule(engine.pool.index.layers[1].module_name)

    def fail(*_: Any) -> None:
        if threading.current_thread().name == "prefill-pass":
            raise RuntimeError("a fault")

    hook = layer.register_forward_pre_hook(fail)
    engine.add(request("long", 90))
    outputs = run_all(engine)
    hook.remove()
    assert outputs["long", 0][-1].error == "a fault"
    assert len(tokens_of(outputs["short", 0])) == 20 - 1  # and the one of the first step
    assert not passes_under_way()
    assert len(engine.generate([request("next", 90)])["next"][0]) == 6


def test_an_expert_that_cannot_be_read_fails_those_who_need_it(engine: Engine) -> None:
    ordinal = len(engine.shape.moe_layers) - 1
    barred = engine.pool.residency.is_barred
    engine.pool.evict([(ordinal, e) for e in range(16)])
    engine.pool.residency.is_barred = lambda layer, e: layer == ordinal  # type: ignore
    engine.add(request("long", 90))
    (output,) = run_all(engine)["long", 0]
    assert output.error_type == "ExpertReadError"
    engine.pool.residency.is_barred = barred  # type: ignore[method-assign]


def test_closing_breaks_a_pass_off() -> None:
    engine = offloaded()
    begin_pass(engine, request("long", 90))
    engine.close()
    assert not passes_under_way()


def test_with_a_slot_for_every_expert_nothing_passes_layer_major() -> None:
    engine = tiny_engine(pool={"expert_memory": "100%"})
    assert prompt_tokens(engine) == 0
    engine.close()


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss", "qwen3_moe", "gemma4_text"])
def test_m13_memory_of_a_pass_is_bounded_by_its_budgets(family: str) -> None:
    """KTransformers#1676: an 8k-token prefill; here as many tokens as the budget allows."""
    budget, scratch = 4 * 1024**2, 2**20
    engine = Engine.open(
        cached_checkpoint(family, "bfloat16"),
        {
            **TINY,
            "context_tokens": 512,
            "kv_memory": "16MiB",
            "prefill_memory": budget,
            "scratch_memory": scratch,
        },
        {**LEAST, "scratch_bytes": scratch},
    )
    tokens = min(prompt_tokens(engine), 512)
    part = SequencePart(
        sequence_id=0,
        start=0,
        token_ids=tuple(5 + at % 290 for at in range(tokens)),
        block_ids=tuple(range(-(-tokens // 4))),
        is_decode=False,
        wants_logits=True,
    )
    engine.pool.begin_step()
    with PeakBytes() as memory:
        engine._runner.run(StepPlan(parts=(part,), layer_major=True))
    engine.pool.end_step()
    allowed = tokens * activation_bytes(engine._runner._model) + 2 * scratch
    print(family, tokens, memory.peak, allowed)
    assert memory.peak <= allowed
    engine.close()


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2), st.integers(0, 6)),
        min_size=1,
        max_size=8,
    ),
    blocks=st.integers(11, 24),
    turns=st.lists(st.sampled_from("sspb"), min_size=1, max_size=20),
    most=st.sampled_from([None, 1]),
)
def test_every_sequence_ends_whatever_the_turns(requests, blocks, turns, most) -> None:
    """s: a step; p: the pass under way is through; b: it is broken off."""
    pages = KvPages(blocks, BLOCK)
    batcher = Batcher(pages, 3, 8, pass_tokens=20, pass_sequences=most)
    todo = [
        (gap, sequence(number, prompt, tokens, first=family * 50))
        for number, (prompt, tokens, family, gap) in enumerate(requests)
    ]
    ended: list[Any] = []

    def finish(batch: Batch) -> None:
        batcher.advance(batch)
        ended.extend(batch.outgrown)
        for part, member in zip(batch.plan.parts, batch.sequences, strict=True):
            assert member.computed == part.start + len(part.token_ids)
            if part.wants_logits:
                member.token_ids.append(len(member.token_ids))
                if member.generated >= member.request.params.max_tokens:
                    batcher.remove(member)
                    ended.append(member)
        pages.check_invariants()

    under_way: Batch | None = None
    clock = broken = 0
    while len(ended) < len(todo):
        for gap, member in todo:
            if gap == clock:
                batcher.add(member)
        turn = turns[clock % len(turns)]
        clock += 1
        assert clock < 3000
        if under_way is None:
            under_way = batcher.plan_pass()
            if under_way is not None:
                assert 8 < under_way.plan.num_tokens <= 20
                assert len(under_way.sequences) <= (most or 3)
                if turn == "b" and broken < 20:
                    broken += 1
                    batcher.break_off(start_over=False)
                    under_way = None
                    continue
        if under_way is not None and (turn == "p" or not batcher.has_decoding):
            finish(under_way)
            under_way = None
            continue
        batch = batcher.plan()
        if under_way is not None:
            busy = {s.sequence_id for s in under_way.sequences}
            assert busy.isdisjoint(s.sequence_id for s in batch.sequences)
            assert all(len(part.token_ids) == 1 for part in batch.plan.parts)
            assert all(s.block_ids for s in under_way.sequences), "one in a pass lost its blocks"
        finish(batch)
    assert pages.used == 0
