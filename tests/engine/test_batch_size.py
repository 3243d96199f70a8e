"""Sizes chosen before each step, on a simulated machine: within bounds, in time, and of use."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.batch_simulator import Arrival, Machine, Routes, Simulation
from benchmarks.batch_sizing import (
    Scene,
    drawn_arrivals,
    drawn_trace,
    independence,
    saving,
)
from core.objectives import ObjectiveSettings
from core.request import Request, SamplingParams
from engine.batch_size import BatchSizer
from engine.expert_demand import ExpertDemand
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.step_cost import StepCost, StepFeatures
from engine.step_forecast import SizeBounds

EXPERTS, TOP_K = 400, 8
STEP_S, EXPERT_S = 0.002, 1e-4
BOUNDS = SizeBounds(1, 16, 64)
NOW_S = 100.0


def objectives(ttft_ms: float = 2000.0, tpot_ms: float = 40.0) -> ObjectiveSettings:
    return ObjectiveSettings(ttft_ms=ttft_ms, tpot_ms=tpot_ms)


@functools.cache
def routes() -> Routes:
    return Routes(drawn_trace(tokens=400, layers=4), 1.0)


def sequence(number: int, prompt: int = 10, said: int = 0, first_s: float | None = None, **more):
    """One that arrived now, or has said so many tokens since `first_s`."""
    params = SamplingParams(max_tokens=200)
    request = Request(request_id=str(number), prompt_ids=(1,) * prompt, params=params)
    made = Sequence(number, request, 0, None)
    made.arrived_s = NOW_S
    if said:
        made.token_ids += [1] * said
        made.computed = len(made.token_ids) - 1
        made.first_token_s = first_s
    for name, value in more.items():
        setattr(made, name, value)
    return made


def sizer(batching="dynamic", asked=None, bounds=BOUNDS, company=True) -> BatchSizer:
    """It knows a machine that takes 2 ms a step and 0.1 ms an expert."""
    made = BatchSizer(
        batching,
        bounds,
        asked or objectives(),
        StepCost(),
        ExpertDemand(EXPERTS, TOP_K),
        lambda: NOW_S,
    )
    for number in range(80):
        decode, prefill = number % 16 + 1, 48 * (number % 5 == 0)
        experts = round(EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** (decode + prefill)))
        made.learn(StepFeatures(decode, prefill, experts, 0, 0), STEP_S + EXPERT_S * experts)
    made._prompt_s = 0.0
    for _ in range(20):
        made.arrived(company)
    return made


def running(count: int, said: int = 5, first_s: float = NOW_S - 0.15) -> list[Sequence]:
    return [sequence(number, said=said, first_s=first_s) for number in range(count)]


def test_nothing_is_bounded_before_anything_is_known() -> None:
    fresh = BatchSizer(
        "frugal", BOUNDS, objectives(), StepCost(), ExpertDemand(EXPERTS, TOP_K), lambda: NOW_S
    )
    limit = fresh.decide(running(3), [sequence(9)])
    assert (limit.sequences, limit.prefill_tokens, limit.hold_s) == (16, 64, 0.0)
    assert limit.reason == "probing"


def test_as_many_run_as_the_time_per_token_allows() -> None:
    slack = sizer(asked=objectives(tpot_ms=40)).decide(running(4), [sequence(9)])
    assert (slack.sequences, slack.reason) == (16, "waiting")
    # Eight sequences touch about 60 experts: 8 ms.
    tight = sizer(asked=objectives(tpot_ms=8.4)).decide(running(8), [sequence(9)])
    assert 7 <= tight.sequences <= 9
    assert tight.reason == "tpot"


def test_where_no_size_would_do_throughput_is_looked_after() -> None:
    limit = sizer(asked=objectives(tpot_ms=1.0)).decide(running(4), [sequence(9)])
    assert (limit.sequences, limit.prefill_tokens, limit.reason) == (16, 60, "throughput")


@pytest.mark.parametrize("largest", [1e18, float("inf")])
def test_no_step_is_put_off_for_ever_by_objectives_without_end(largest: float) -> None:
    asked = ObjectiveSettings.model_construct(ttft_ms=largest, tpot_ms=largest)
    made = sizer("frugal", asked)
    for run in ([], running(2)):
        limit = made.decide(run, [sequence(9)])
        assert 0.0 < limit.hold_s <= 60.0
        assert limit.sequences >= 1


def test_no_size_is_below_the_fewest_or_below_those_that_run() -> None:
    made = sizer(asked=objectives(tpot_ms=4.0), bounds=SizeBounds(6, 16, 64))
    assert made.decide(running(2), [sequence(9)]).sequences == 6
    assert made.decide(running(9), [sequence(99)]).sequences == 9


def test_a_first_token_at_risk_goes_before_the_time_of_the_others() -> None:
    made = sizer(asked=objectives(tpot_ms=8.4))
    late = [sequence(20 + n, arrived_s=NOW_S - 1.5) for n in range(3)]
    limit = made.decide(running(10), late)
    assert (limit.sequences, limit.prefill_tokens, limit.reason) == (13, 54, "ttft")


def test_prompts_wait_rather_than_make_a_running_one_late_and_then_pass_in_full() -> None:
    made = sizer(asked=objectives(tpot_ms=14))
    behind = running(4, said=5, first_s=NOW_S - 0.060)
    assert made.decide(behind, [sequence(9, prompt=200)]).prefill_tokens == 0
    ahead = running(4, said=8, first_s=NOW_S - 0.030)
    assert made.decide(ahead, [sequence(9, prompt=200)]).prefill_tokens == 60
    waited = sequence(9, prompt=200, arrived_s=NOW_S - 1.5)
    assert made.decide(behind, [waited]).prefill_tokens == 60


def test_fixed_batches_are_the_bounds() -> None:
    limit = sizer("fixed", asked=objectives(tpot_ms=1.0)).decide(running(4), [sequence(9)])
    assert (limit.sequences, limit.prefill_tokens, limit.hold_s) == (16, 64, 0.0)


CALM = objectives(tpot_ms=80)


def test_only_frugal_batches_are_put_off_and_only_in_company() -> None:
    few = running(3)
    # 72 ms may pass since the last step; with a full prompt part the next one takes 34 at most.
    assert 0.02 < sizer("frugal", CALM).decide(few, []).hold_s < 0.04
    assert sizer("dynamic", CALM).decide(few, []).hold_s == 0.0
    assert sizer("frugal", CALM, company=False).decide(few, []).hold_s == 0.0
    assert sizer("frugal", CALM).decide(few, [sequence(9)], blocked=True).hold_s == 0.0


def test_the_tightest_sequence_ends_the_pause() -> None:
    made = sizer("frugal", CALM)
    behind = sequence(8, said=5, first_s=NOW_S - 0.36)
    assert made.decide([*running(3), behind], []).hold_s == 0.0
    pressed = sequence(8, said=5, first_s=NOW_S - 0.15, deadline_s=NOW_S + 195 * 0.010)
    assert made.decide([*running(3), pressed], []).hold_s == 0.0
    waited = sequence(9, arrived_s=NOW_S - 1.0)
    assert made.decide(running(3), [waited]).hold_s == 0.0
    waits = sequence(9, arrived_s=NOW_S - 0.975)  # due in 25 ms, of which it takes about 13
    assert 0.0 < made.decide(running(3), [waits]).hold_s < 0.015


def test_a_short_prompt_waits_for_others_while_it_has_time() -> None:
    made = sizer("frugal", CALM)
    limit = made.decide(running(3), [sequence(9)])
    assert (limit.sequences, limit.reason) == (3, "gathering")
    assert made.decide(running(3), [sequence(9, arrived_s=NOW_S - 0.95)]).sequences == 16
    assert made.decide(running(3), [sequence(9, prompt=61)]).sequences == 16, "it fills a step"
    alone = made.decide([], [sequence(9)])
    assert alone.sequences == 16, "who steps nevertheless gets all there is"
    assert 0.5 < alone.hold_s < 1.0


def test_a_burst_finds_places() -> None:
    assert sizer("frugal", CALM).decide(running(6), []).hold_s > 0.0
    assert sizer("frugal", CALM).decide(running(12), []).hold_s == 0.0


def test_accelerators_are_given_wider_bounds() -> None:
    assert (EngineSettings().max_sequences, EngineSettings().fewest_sequences) == (32, 1)
    device = EngineSettings(device="cuda:0")
    assert (device.max_sequences, device.fewest_sequences) == (64, 16)
    small = EngineSettings(device="cuda:0", max_sequences=8)
    assert (small.max_sequences, small.fewest_sequences) == (8, 8)
    with pytest.raises(ValueError, match=r"min_sequences \(9\) may be at most max_sequences"):
        EngineSettings(max_sequences=8, min_sequences=9)


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.floats(0, 0.2), st.integers(1, 150), st.integers(1, 30)),
        min_size=3,
        max_size=30,
    ),
    batching=st.sampled_from(("dynamic", "frugal")),
    tpot_ms=st.sampled_from((4.0, 15.0, 60.0)),
    ttft_ms=st.sampled_from((100.0, 1000.0)),
    most=st.sampled_from((2, 8)),
    fewest=st.integers(1, 2),
)
def test_nobody_starves_and_nothing_is_put_off_too_long(
    requests, batching, tpot_ms, ttft_ms, most, fewest
) -> None:
    asked = objectives(ttft_ms, tpot_ms)
    machine = Machine(
        overhead_s=0.001, expert_bytes=10e6, backbone_bytes=0.3e9, noise=0.0, pause_share=0.0
    )
    bounds = SizeBounds(fewest, most, 64)
    simulation = Simulation(machine, routes(), asked, batching, bounds)
    batcher = simulation.batcher
    hold, plan = batcher.hold_s, batcher.plan

    def checked_hold() -> float:
        hold_s, now_s = hold(), simulation.now_s
        if hold_s > 0:
            assert batching == "frugal"
            until_s = now_s + hold_s
            for member in batcher.waiting:
                assert until_s <= member.arrived_s + 0.5 * ttft_ms / 1e3
            for member in batcher.running:
                if member.first_token_s is not None:
                    due_s = member.first_token_s + member.generated * tpot_ms / 1e3
                    assert until_s < due_s
        return hold_s

    def checked_plan():
        batch = plan()
        assert len(batcher.running) <= most
        assert batch.plan.parts
        taken = sum(len(p.token_ids) for p in batch.plan.parts if not p.is_decode)
        for member in batcher.waiting:
            if simulation.now_s - member.arrived_s > ttft_ms / 1e3:
                full = batch.plan.num_tokens == 64 or len(batcher.running) == most
                assert full, f"a late one waits for no reason, beside {taken} prompt tokens"
        return batch

    batcher.hold_s, batcher.plan = checked_hold, checked_plan
    at_s, arrivals = 0.0, []
    for gap_s, prompt, answer in requests:
        at_s += gap_s
        arrivals.append(Arrival(at_s, prompt, answer))
    outcome = simulation.run(arrivals, drain=True)
    assert outcome.done == len(requests)
    assert not (batcher.running or batcher.waiting)
    # Each step lets somebody go on: there are no more of them than tokens.
    assert simulation.outcome.steps <= sum(prompt + answer for _, prompt, answer in requests)


@functools.cache
def scene(tpot_ms: float = 200.0, ttft_ms: float = 2000.0) -> Scene:
    return Scene(
        drawn_trace(tokens=1000), drawn_arrivals(100), Machine(), objectives(ttft_ms, tpot_ms)
    )


def test_at_a_third_of_the_load_frugal_batches_read_a_fifth_less_and_keep_the_objectives() -> None:
    rows = [scene().row(policy, 0.3) for policy in ("fixed 8", "fixed 16", "fixed 64", "frugal")]
    assert saving(rows, "frugal", 0.3)["saving"] >= 0.2
    assert rows[-1]["ttft_attainment"] >= 0.99
    assert rows[-1]["tpot_attainment"] >= 0.99


def test_near_capacity_frugal_batches_read_no_more() -> None:
    rows = [scene().row(policy, 0.9) for policy in ("fixed 32", "fixed 64", "frugal")]
    assert saving(rows, "frugal", 0.9)["saving"] >= 0.0


@pytest.mark.parametrize(("tpot_ms", "load"), [(500.0, 0.9), (500.0, 1.5), (5.0, 1.5)])
def test_dynamic_batches_cost_no_throughput_where_objectives_are_slack_or_lost(
    tpot_ms: float, load: float
) -> None:
    fixed, dynamic = (scene(tpot_ms).row(policy, load) for policy in ("fixed 64", "dynamic"))
    assert dynamic["requests_done"] >= 0.98 * fixed["requests_done"]


def test_dynamic_batches_keep_what_fixed_ones_break_where_a_size_can() -> None:
    tight = scene(95.0, 20000.0)
    fixed, dynamic = (tight.row(policy, 0.9) for policy in ("fixed 64", "dynamic"))
    assert dynamic["both_attainment"] > fixed["both_attainment"] + 0.05


def test_the_expectation_of_independent_experts() -> None:
    ratios = {row["sequences"]: row["effective_activation_ratio"] for row in independence()}
    assert ratios[1] == pytest.approx(0.0156, abs=1e-4)
    assert ratios[32] == pytest.approx(0.0124, abs=1e-4)
