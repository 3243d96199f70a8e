"""What steps cost is found from the steps, and told once it is known."""

from __future__ import annotations

import random

import pytest

from core.request import Request, SamplingParams
from core.step import PoolStepStats, RoutingSummary, StepStats
from deployments.live_request import LiveRequest
from deployments.replica_cost import ReplicaCost
from deployments.replica_news import ReplicaNews
from deployments.replica_report import ReplicaReport, domain_hash


def steps(count: int, seed: int = 0, noise: float = 0.1, **costs: float) -> list[StepStats]:
    """Steps of what a decode step, a sequence, a prompt token and a miss take."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        decode = draw.randint(1, 16)
        prefill = draw.choice((0, 0, 0, 0, draw.randint(1, 512)))
        asked = 40 * decode
        missed = draw.randint(0, asked // 4)
        exact = (
            costs.get("step", 0.01)
            + costs.get("sequence", 0.001) * decode
            + costs.get("token", 0.0002) * prefill
            + costs.get("miss", 0.0005) * missed
        )
        made.append(
            StepStats(
                step=number,
                step_s=exact * draw.uniform(1 - noise, 1 + noise),
                decode_tokens=decode,
                prefill_tokens=prefill,
                pool=PoolStepStats(demand_hits=asked - missed, demand_misses=missed),
            )
        )
    return made


def learned(stats: list[StepStats]) -> ReplicaCost:
    cost = ReplicaCost()
    for one in stats:
        cost.learn(one)
    return cost


def test_what_things_cost_is_found_within_the_noise() -> None:
    cost = learned(steps(600))
    assert cost.step_s == pytest.approx(0.01, rel=0.15)
    assert cost.sequence_s == pytest.approx(0.001, rel=0.15)
    assert cost.prefill_token_s == pytest.approx(0.0002, rel=0.15)
    assert cost.miss_s == pytest.approx(0.0005, rel=0.15)
    assert cost.experts_a_token == pytest.approx(40)
    assert 0.8 < cost.hit_rate < 0.95


def test_it_follows_a_machine_that_becomes_slower() -> None:
    cost = learned(steps(600) + steps(1500, seed=1, step=0.03, miss=0.002))
    assert cost.step_s == pytest.approx(0.03, rel=0.2)
    assert cost.miss_s == pytest.approx(0.002, rel=0.2)


def test_nothing_is_said_before_enough_is_known() -> None:
    cost = learned(steps(30))
    assert (cost.step_s, cost.sequence_s, cost.prefill_token_s, cost.miss_s) == (0, 0, 0, 0)
    assert ReplicaCost().hit_rate == 1.0


def test_a_step_that_took_an_age_tells_of_something_else() -> None:
    stats = steps(600)
    stats[400].step_s = 60.0
    assert learned(stats).step_s == pytest.approx(0.01, rel=0.2)


def test_costs_are_never_below_nothing() -> None:
    draw = random.Random(5)
    for seed in range(30):
        stats = steps(40, seed)
        for one in stats:
            one.step_s = draw.uniform(0, 0.1)
        cost = learned(stats)
        assert min(cost.step_s, cost.sequence_s, cost.prefill_token_s, cost.miss_s) >= 0


def test_equal_steps_alone_teach_without_an_error() -> None:
    same = [
        StepStats(step=i, step_s=0.05, decode_tokens=4, pool=PoolStepStats(demand_hits=160))
        for i in range(200)
    ]
    cost = learned(same)
    assert cost.step_s + 4 * cost.sequence_s == pytest.approx(0.05, rel=1e-3)
    assert cost.miss_s == 0


def live(name: str, n: int = 1, prompt: int = 10) -> LiveRequest:
    request = Request(
        request_id=name,
        prompt_ids=tuple(range(1, prompt + 1)),
        params=SamplingParams(max_tokens=8),
        n=n,
    )

    class Plain(LiveRequest):
        def __init__(self) -> None:
            self.request = request
            self._open = set(range(n))
            self._started: set[int] = set()

    return Plain()


def test_a_report_says_what_is_there_and_where_experts_lie() -> None:
    news = ReplicaNews(kv_block_tokens=16)
    news.max_sequences = 8
    for one in steps(100):
        one.running, one.kv_blocks_used, one.kv_blocks_total = 2, 30, 100
        news.step(one)
    told = StepStats(
        step=100,
        step_s=0.0,
        running=2,
        kv_blocks_used=30,
        kv_blocks_total=100,
        routing=RoutingSummary(hit_rate=0.7, hit_rate_by_domain={"code": 0.9}, miss_s=0.001),
    )
    news.gauges(told)
    news.answered(2, 60)
    begun = live("a")
    begun._started.add(0)
    report = news.report([begun, live("b", n=2, prompt=300)], ready=True)
    assert (report.running, report.waiting, report.prompt_tokens) == (2, 1, 300)
    assert (report.kv_free_tokens, report.kv_tokens) == (70 * 16, 100 * 16)
    assert report.cold_token_s == pytest.approx(0.04, rel=0.01), "the pool's own measure wins"
    hidden = StepStats(step=101, step_s=0.0, routing=RoutingSummary(hit_rate=0.7))
    news.gauges(hidden)
    assert news.report([], ready=True).cold_token_s == 0, "misses that nobody waits for"
    news.gauges(told)
    assert report.answer_tokens == 30
    assert (report.hit_rate, report.domains) == (0.7, {domain_hash("code"): 0.9})
    assert report.measured and report.served_tokens > 0
    news.lost()
    gone = news.report([], ready=False)
    assert (gone.ready, gone.running, gone.domains) == (False, 0, {})
    assert gone.served_tokens == 0, "the next rank begins empty: as new, and without prefixes"


def test_an_idle_replica_says_the_same_again_with_the_same_time() -> None:
    news = ReplicaNews(kv_block_tokens=16)
    for one in steps(100):
        news.step(one)
    first = news.floats([], True, 1000.0)
    assert news.floats([], True, 2000.0) == first
    assert news.floats([live("a")], True, 2001.0) != first
    again = news.floats([live("a")], True, 2002.0)
    report = ReplicaReport.from_floats(again)
    assert report is not None and report.made_s == 2001.0
    assert len(first) <= 32 and {type(number) for number in first} == {float}
