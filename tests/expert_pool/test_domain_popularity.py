"""Popularity by domain and session: whose tokens count, for how much, and what is forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_pool.domain_popularity import _FREE_TOKENS, MAX_ROWS, DomainPopularity, Label
from expert_pool.label_table import LabelTable
from expert_pool.popularity import Popularity

LAYERS, EXPERTS = 2, 8
ROOM = 2**20


def counts_of(expert: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """So many tokens of which each chose one expert, in every layer."""
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    counts[:, expert] = tokens
    return counts, np.full(LAYERS, float(tokens))


def taught(share: float = 0.5, **of: tuple[int, int]) -> DomainPopularity:
    """A domain "code": by tenant, the expert that it uses and how many tokens."""
    known = DomainPopularity(LAYERS, EXPERTS, ROOM, share)
    for tenant, (expert, tokens) in of.items():
        known.learn(Label(tenant, "code", ""), *counts_of(expert, tokens))
        known.learn_everyone(*counts_of(expert, tokens))
    return known


def test_a_domain_differs_from_everyone_and_an_unknown_one_does_not():
    known = taught(ann=(1, 200))
    known.learn_everyone(*counts_of(2, 2000))
    code = known.expected(Label("bob", "code", ""))
    assert code[0].argmax() == 1
    assert code[0, 1] > 0.9
    assert not known.knows(Label("bob", "poems", ""))
    assert known.expected(Label("bob", "poems", ""))[0].argmax() == 2
    assert known.expected(Label("bob", "", ""))[0].argmax() == 2


def test_nothing_is_expected_before_anything_is_known():
    known = DomainPopularity(LAYERS, EXPERTS, ROOM, 0.5)
    assert known.expected(Label("a", "code", "s")) is None
    assert known.of_domain("code") is None
    assert known.tops_of_others(Label("a", "code", "")) is None
    assert known.tops_of_everyone() is None


def test_a_session_is_its_tenants_own_and_starts_as_its_domain():
    known = taught(ann=(1, 200))
    known.learn(Label("ann", "", "chat"), *counts_of(5, 400))
    assert known.expected(Label("ann", "code", "chat"))[0].argmax() == 5
    assert known.expected(Label("bob", "code", "chat"))[0].argmax() == 1
    assert not known.knows(Label("bob", "", "chat"))
    known.learn(Label("ann", "", "other chat"), *counts_of(6, 4))
    young = known.expected(Label("ann", "code", "other chat"))[0]
    assert young.argmax() == 1
    assert young[6] > known.expected(Label("ann", "code", ""))[0, 6]


def test_a_tenant_that_taught_much_is_served_by_its_own():
    known = taught(loud=(1, 100_000), quiet=(2, 8000))
    assert known.expected(Label("quiet", "code", ""))[0, 2] > 0.9
    assert known.expected(Label("new", "code", ""))[0, 2] < 0.6


def test_one_tenant_alone_is_the_domain_and_with_others_it_is_capped():
    assert taught(loud=(1, 100_000)).of_domain("code")[0, 1] > 0.95
    rates = taught(loud=(1, 100_000), quiet=(2, 8000)).of_domain("code")[0]
    assert rates[1] == pytest.approx(0.5, abs=0.04)
    assert rates[2] == pytest.approx(0.5, abs=0.04)
    tight = taught(0.25, loud=(1, 100_000), a=(2, 6000), b=(3, 6000)).of_domain("code")[0]
    assert tight[1] == pytest.approx(0.25, abs=0.04)


@settings(max_examples=60, deadline=None)
@given(
    share=st.sampled_from((0.25, 0.5, 0.75)),
    sizes=st.lists(st.integers(1, 1_000_000), min_size=2, max_size=5),
)
def test_no_tenant_exceeds_its_share_of_what_others_taught(share, sizes):
    known = taught(share, **{f"t{at}": (at, size) for at, size in enumerate(sizes)})
    rates = known.of_domain("code")[0]
    held = [float(row.tokens[0]) for row in known._domains.of("code").values()]
    for at, own in enumerate(held):
        others = sum(held) - own
        allowed = min(own, share / (1 - share) * others + _FREE_TOKENS)
        # What it may count for, beside what the others count for at least.
        others_count = sum(
            min(h, share / (1 - share) * (sum(held) - h) + _FREE_TOKENS)
            for n, h in enumerate(held)
            if n != at
        )
        drawn = 16 * known.of_everyone()[0, at]
        assert rates[at] <= (allowed + drawn) / (allowed + others_count + 16) + 1e-3
    assert rates.sum() == pytest.approx(1.0, abs=1e-3)


def test_who_invents_names_drops_its_own():
    table = LabelTable(LAYERS, EXPERTS, 100, most_rows=4)
    for name in ("code", "law"):
        table.add("honest", name, *counts_of(0, 1))
    for number in range(20):
        table.add("flood", f"name {number}", *counts_of(1, 1))
    assert set(table.rows) == {
        ("honest", "code"),
        ("honest", "law"),
        ("flood", "name 18"),
        ("flood", "name 19"),
    }
    table.add("third", "law", *counts_of(1, 1))
    assert ("honest", "law") in table.rows or ("honest", "code") in table.rows
    assert ("third", "law") in table.rows
    assert len(table.rows) == 4


def test_many_tenants_with_one_row_each_are_forgotten_by_use():
    table = LabelTable(LAYERS, EXPERTS, 100, most_rows=3)
    for tenant in "abc":
        table.add(tenant, "code", *counts_of(0, 1))
    table.add("a", "code", *counts_of(0, 1))
    table.add("d", "code", *counts_of(0, 1))
    assert [tenant for tenant, _ in table.rows] == ["c", "a", "d"]


def test_memory_bounds_the_number_of_names():
    for memory, most in ((0, 0), (4 * 3 * LAYERS * (4 * EXPERTS + 8), 3), (2**30, MAX_ROWS)):
        known = DomainPopularity(LAYERS, EXPERTS, memory, 0.5)
        known.learn_everyone(*counts_of(0, 5))
        for number in range(100):
            known.learn(Label("t", f"d{number}", f"s{number}"), *counts_of(1, 5))
            known.expected(Label("t", f"d{number}", f"s{number}"))
        assert len(known.domains) == len(known.sessions.rows) == most
        assert known.learns_names == (most > 0)
        assert known.nbytes <= memory + 4 * (known.everyone.counts.nbytes + 16) + 64


def test_a_row_that_does_not_count_serves_its_tenant_alone():
    known = taught(liar=(1, 2000), honest=(2, 2000))
    liar, newcomer = Label("liar", "code", ""), Label("new", "code", "")
    assert known.expected(newcomer)[0, 1] == pytest.approx(0.5, abs=0.05)
    known.count(liar, counts=False)
    assert known.expected(newcomer)[0, 2] > 0.95
    assert known.expected(liar)[0, 1] > 0.7
    known.learn(liar, *counts_of(1, 500))
    assert known.fresh_by_domain()["code"].tokens[0] == 4000
    known.count(liar, counts=True)
    assert known.expected(newcomer)[0, 1] > 0.4
    known.count(Label("nobody", "code", ""), counts=False)
    assert known.uncounted == set()


def test_m5_a_table_that_is_replaced_under_load_is_seen_whole():
    """moe-l2 0.8.1: the domain table swapped twice while it is read."""

    def table(expert: int) -> dict[str, Popularity]:
        made = {}
        for name in ("code", "law"):
            made[name] = Popularity(LAYERS, EXPERTS, 1000)
            made[name].add_all(*counts_of(expert, 1000))
        return made

    known = DomainPopularity(LAYERS, EXPERTS, ROOM, 0.5)
    for expert in (3, 4, 3):
        tables = table(expert)
        known.replace_earlier(tables["code"], tables)
        seen = {int(known.of_domain(name)[layer].argmax()) for name in tables for layer in (0, 1)}
        assert seen == {expert}
        assert known.of_everyone()[0].argmax() == expert
    assert known.domains == ["code", "law"]


def test_earlier_runs_count_less_the_more_is_learned_here():
    known = DomainPopularity(LAYERS, EXPERTS, ROOM, 0.5)
    earlier = Popularity(LAYERS, EXPERTS, 50_000)
    earlier.add_all(*counts_of(3, 40_000))
    known.replace_earlier(earlier, {"code": earlier})
    assert known.expected(Label("c", "code", ""))[0].argmax() == 3
    assert known.of_everyone()[0].argmax() == 3
    known.learn(Label("a", "code", ""), *counts_of(1, 8000))
    known.learn(Label("b", "code", ""), *counts_of(1, 8000))
    for _ in range(16):  # what was derived is derived anew after so many
        known.learn_everyone(*counts_of(1, 1000))
    assert known.expected(Label("c", "code", ""))[0].argmax() == 1
    assert known.of_everyone()[0].argmax() == 1


def test_names_that_a_client_invents_keep_no_domain_from_being_kept():
    known = DomainPopularity(LAYERS, EXPERTS, ROOM, 0.5)
    known.learn_everyone(*counts_of(0, 10))
    for number in range(3 * MAX_ROWS):
        known.learn(Label("flood", f"name {number}", ""), *counts_of(1, 5))
    known.learn(Label("ann", "code", ""), *counts_of(2, 5))
    for number in range(3 * MAX_ROWS):
        known.learn(Label("flood", f"more {number}", ""), *counts_of(1, 5))
    fresh = known.fresh_by_domain()
    assert fresh["code"].tokens[0] == 5
    assert len(fresh) <= len(known._fresh_tokens) <= MAX_ROWS


def test_what_is_fresh_is_told_once_it_was_kept():
    known = taught(ann=(1, 1000), bob=(2, 1000))
    fresh = known.fresh_by_domain()["code"]
    assert fresh.tokens[0] == 2000
    assert fresh.counts[0].sum() == pytest.approx(2000, rel=0.01)
    assert fresh.counts[0, 1] == pytest.approx(fresh.counts[0, 2], rel=0.05)
    assert set(known.fresh_by_domain()) == {"code"}
    known.forget_fresh()
    assert known.fresh_by_domain() == {}
