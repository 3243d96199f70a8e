"""Labels and hints as a client that means harm would send them: bounded, and nobody else's loss."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from core.step import HintStats
from expert_pool import preload
from expert_pool.domain_popularity import MAX_ROWS
from tests.expert_pool.fake_experts import FakeIndex
from tests.expert_pool.test_expectations import HOME, SHAPE, hinted_pool, part, resident, serve
from tests.expert_pool.test_pool import open_pool, slots_bytes

EVERYTHING = [(layer, e) for layer in range(2) for e in range(16)]


@pytest.fixture
def index(tmp_path):
    return FakeIndex(tmp_path / "model", SHAPE)


def looked_at(pool, hints, monkeypatch) -> list[str]:
    """Whose of these hints, of (tenant, domain), were looked at."""
    found: list[str] = []
    begin = functools.partial(preload.Preloader.begin, pool.expectations.preloader)
    monkeypatch.setattr(
        pool.expectations.preloader,
        "begin",
        lambda label, rates: (found.append(label.tenant), begin(label, rates)),
    )
    for tenant, domain in hints:
        pool.hint(domain, tenant=tenant)
    return found


def test_a_flood_of_hints_costs_little_and_leaves_some_to_others(index, monkeypatch):
    monkeypatch.setattr(preload, "SLOTS_A_SECOND", 10.0)
    now = [0.0]
    pool, _ = hinted_pool(index, clock=lambda: now[0])
    pool.preload([(0, e) for e in HOME["code"]] + [(1, e) for e in HOME["code"]])
    pool.settle()
    hints = [("flood", "code")] * 3000 + [("quiet", "code")] * 3
    found = looked_at(pool, hints, monkeypatch)
    assert found == ["flood"] * (preload.LOOKS_A_SECOND // 2) + ["quiet"] * 3
    many = looked_at(pool, [(f"t{n}", "code") for n in range(3000)], monkeypatch)
    assert len(many) == preload.LOOKS_A_SECOND - len(found)
    now[0] += 1.0
    assert looked_at(pool, [("flood", "code")], monkeypatch) == ["flood"]
    pool.settle()
    pool.check_invariants()
    pool.close()


def test_a_clock_that_jumps_back_does_not_stop_hints(index, monkeypatch):
    monkeypatch.setattr(preload, "SLOTS_A_SECOND", 10.0)
    now = [1000.0]
    pool, _ = hinted_pool(index, clock=lambda: now[0])
    now[0] = 3.0
    pool.evict(EVERYTHING)
    pool.hint("code", tenant="t")
    pool.settle()
    assert len(set(HOME["code"]) & resident(pool, 0)) >= 2
    pool.close()


def test_hints_of_requests_that_never_come_end_and_evict_no_hot_expert(index, monkeypatch):
    monkeypatch.setattr(preload, "SLOTS_A_SECOND", 10.0)
    now = [0.0]
    hot = {0: [12], 1: [13]}
    pool, model = hinted_pool(index, clock=lambda: now[0], hot_set=hot, prefetch="on")
    draw = np.random.default_rng(2)
    total = HintStats()
    for step in range(300):
        now[0] += 1.0
        pool.hint("code", f"gone {step}", "t", (1, 2))
        stats = serve(pool, model, (part(9000, 1, "law", start=step + 1),), draw).hints
        for name in ("received", "begun", "useful", "wasted", "dropped"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        pool.check_invariants()
        assert 12 in resident(pool, 0) and 13 in resident(pool, 1)
    pool.settle()
    waiting = sum(map(len, pool.expectations.preloader._open))
    assert total.received == 300
    assert total.begun > 0
    assert total.begun >= total.useful + total.wasted + total.dropped
    assert waiting <= sum(pool.residency.quotas)
    pool.close()


def test_thousands_of_labels_are_bounded_whatever_they_are(index):
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 6), hints="on")
    draw = np.random.default_rng(0)
    odd = ["x" * 100_000, "\ud800", "\x00", " ", "a\nb", "\N{PILE OF POO}" * 70]
    for step in range(400):
        name = odd[step] if step < len(odd) else f"name {step}"
        parts = tuple(part(3 * step + at, 2, name, name, f"t{(step + at) % 90}") for at in range(3))
        serve(pool, model, parts, draw)
        pool.hint(name, name, "t", (step,))
    known = pool.expectations.popularity
    assert len(known._domains.rows) == len(known.sessions.rows) == MAX_ROWS
    assert len(known._fresh_tokens) <= MAX_ROWS + 1
    assert max(len(text) for key in known.sessions.rows for text in key) <= 100
    assert pool.expectations.nbytes < pool.settings.popularity_memory
    summary = pool.routing_summary()
    assert len(summary.hit_rate_by_domain) == 32
    assert all(0.0 <= rate <= 1.0 for rate in summary.hit_rate_by_domain.values())
    pool.settle()
    pool.check_invariants()
    pool.close()


def test_conversations_whose_names_begin_alike_are_two(index):
    pool, model = open_pool(index)
    draw = np.random.default_rng(0)
    begins = "s" * 200
    for step in range(12):
        parts = (
            part(2 * step, 6, "code", f"{begins} one", start=0),
            part(2 * step + 1, 6, "law", f"{begins} two", start=0),
        )
        serve(pool, model, parts, draw)
    for session, home in (("one", HOME["code"]), ("two", HOME["law"])):
        rates = pool.signature("", f"{begins} {session}", (), "t")[0]
        assert rates[list(home)].sum() > 1.5
    stranger = pool.signature("", f"{begins} one", (), "another tenant")
    assert stranger is pool.expectations.popularity.of_everyone() or stranger[0, :3].sum() < 1.5
    pool.close()
