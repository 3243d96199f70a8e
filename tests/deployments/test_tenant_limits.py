"""Limits with a clock of ours: exact in any minute, given back, and outliving a dead gateway."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import EngineUnavailableError
from deployments.limits_client import Limits, LimitsClient
from deployments.openai_errors import TenantLimitError
from deployments.tenant_limits import LEASE_S, Allowance, TenantLimits, Use


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_requests_a_minute_and_when_to_come_back() -> None:
    clock = Clock()
    limits = TenantLimits(clock)
    allowance = Allowance(requests_per_minute=3)
    for number in range(3):
        assert limits.acquire(str(number), "a", allowance) is None
        clock.now_s += 10
    refusal = limits.acquire("x", "a", allowance)
    assert refusal is not None and "3 requests a minute" in refusal.message
    assert 30 <= refusal.retry_after_s <= 31
    assert limits.acquire("y", "b", allowance) is None, "another tenant is another matter"
    clock.now_s += refusal.retry_after_s
    assert limits.acquire("x", "a", allowance) is None


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 40)), max_size=80))
def test_no_minute_ever_has_more_than_the_limit(arrivals: list[tuple[float, int]]) -> None:
    clock = Clock()
    limits = TenantLimits(clock)
    allowance = Allowance(requests_per_minute=10, tokens_per_minute=100)
    given_at: list[tuple[float, int]] = []
    for number, (pause_s, tokens) in enumerate(arrivals):
        clock.now_s += pause_s
        if limits.acquire(str(number), "a", allowance) is None:
            refused = limits.charge("a", tokens, allowance)
            if refused is None:
                given_at.append((clock.now_s, tokens))
            else:
                clock.now_s += refused.retry_after_s
                assert limits.charge("a", tokens, allowance) is None, "the time that was told"
                given_at.append((clock.now_s, tokens))
    for moment, _ in given_at:
        minute = [tokens for at, tokens in given_at if moment <= at < moment + 60]
        assert sum(minute) <= 100 and len(minute) <= 10


def test_what_was_really_generated_counts_and_a_long_prompt_passes_alone() -> None:
    clock = Clock()
    limits = TenantLimits(clock)
    allowance = Allowance(tokens_per_minute=100)
    assert limits.acquire("1", "a", allowance) is None
    assert limits.charge("a", 500, allowance) is None, "more than a minute's worth, but alone"
    limits.report([Use("1", "a", 40)])
    assert limits.counts()["a"]["tokens"] == 540
    limits.report([Use("1", "a", 100, ended=True)])
    assert limits.counts()["a"] == {"requests": 1, "tokens": 600, "at_once": 0}
    assert limits.acquire("2", "a", allowance) is not None
    clock.now_s += 61
    assert limits.acquire("2", "a", allowance) is None
    clock.now_s += 61
    assert limits.counts() == {}, "nothing is kept of who is gone"


def test_concurrency_is_given_back_and_a_dead_gateways_part_expires() -> None:
    clock = Clock()
    limits = TenantLimits(clock)
    allowance = Allowance(concurrency=2)
    assert limits.acquire("1", "a", allowance) is None
    assert limits.acquire("2", "a", allowance) is None
    assert limits.acquire("3", "a", allowance) is not None
    clock.now_s += 4
    limits.report([Use("1", "a", ended=True)])
    assert limits.acquire("3", "a", allowance) is None
    refusal = limits.acquire("4", "a", allowance)
    assert refusal is not None and refusal.retry_after_s == 2.0  # two at once, four seconds each
    clock.now_s += LEASE_S - 1
    limits.report([Use("3", "a")])
    clock.now_s += 2
    assert limits.counts()["a"]["at_once"] == 1, "the one that nobody renewed is gone"


def test_after_a_restart_leases_are_taken_on_but_ended_ones_stay_ended() -> None:
    limits = TenantLimits(Clock())
    limits.report([Use("old", "a", 5)])
    assert limits.counts()["a"] == {"requests": 0, "tokens": 5, "at_once": 1}
    limits.report([Use("old", "a", ended=True)])
    limits.report([Use("old", "a")])
    assert limits.counts()["a"]["at_once"] == 0


class Flaky(Limits):
    down = False
    reports = 0

    async def report(self, uses: list[Use]) -> None:
        self.reports += 1
        if self.down:
            raise EngineUnavailableError("away")
        await super().report(uses)


def test_a_place_is_free_when_the_end_is_awaited() -> None:
    async def run() -> None:
        client = LimitsClient(Limits(), "g")
        allowance = Allowance(concurrency=1)
        for _ in range(50):
            lease = await client.lease("a", allowance)
            assert lease is not None
            with pytest.raises(TenantLimitError):
                await client.lease("a", allowance)
            lease.produced(3)
            await lease.end()
            await lease.end()
        assert (await client.counts())["a"] == {"requests": 50, "tokens": 150, "at_once": 0}
        assert await client.lease("a", Allowance()) is None

    asyncio.run(run())


def test_what_could_not_be_reported_is_reported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.limits_client.RENEW_S", 0.01)

    async def run() -> None:
        store = Flaky()
        client = LimitsClient(store, "g")
        one = await client.lease("a", Allowance(concurrency=9))
        two = await client.lease("a", Allowance(concurrency=9))
        assert one is not None and two is not None
        store.down = True
        one.produced(3)
        await one.end()  # does not hang
        two.produced(4)
        while store.reports < 4:
            await asyncio.sleep(0.01)
        two.produced(1)
        store.down = False
        await two.end()
        while (await client.counts())["a"]["at_once"]:
            await asyncio.sleep(0.01)
        assert (await client.counts())["a"]["tokens"] == 8

    asyncio.run(run())


def test_a_report_that_comes_twice_or_late_is_counted_once() -> None:
    clock = Clock()
    limits = TenantLimits(clock)
    limits.acquire("1", "a", Allowance(tokens_per_minute=100))
    for tokens in (3, 3, 5, 3):
        limits.report([Use("1", "a", tokens)])
    assert limits.counts()["a"]["tokens"] == 5
    for _ in range(2):
        limits.report([Use("1", "a", 9, ended=True)])
    limits.report([Use("1", "a", 7)])
    assert limits.counts()["a"] == {"requests": 1, "tokens": 9, "at_once": 0}
    after = TenantLimits(clock)
    after.report([Use("1", "a", 9, acknowledged=7)])
    assert after.counts()["a"]["tokens"] == 2, "a restart charges no stream from its beginning"
    clock.now_s += LEASE_S
    after.report([Use("1", "a", 10, acknowledged=9)])
    assert after.counts()["a"]["tokens"] == 3, "nor does a report after too long"


class Breaking(Limits):
    """What it was told is counted, but the answer is an error that nobody foresaw."""

    broken = 2

    async def report(self, uses: list[Use]) -> None:
        await super().report(uses)
        self.broken -= 1
        if self.broken >= 0:
            raise ZeroDivisionError


def test_no_error_of_a_report_holds_a_client_or_charges_it_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.limits_client.RENEW_S", 0.01)

    async def run() -> None:
        client = LimitsClient(Breaking(), "g")
        for number in range(1, 4):
            lease = await client.lease("a", Allowance(concurrency=9))
            assert lease is not None
            lease.produced(3)
            await asyncio.wait_for(lease.end(), 5)
            assert (await client.counts())["a"]["tokens"] == 3 * number
        reporter = client._reporter
        assert reporter is not None
        await asyncio.wait_for(reporter, 5)
        assert (await client.counts())["a"] == {"requests": 3, "tokens": 9, "at_once": 0}

    asyncio.run(run())
