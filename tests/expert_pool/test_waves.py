"""Experts that outnumber slots: waves are split by expert, and slots never mix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_pool.waves import LayerPass
from tests.expert_pool.fake_experts import FakeIndex, FakeModel, FakeShape, random_routing
from tests.expert_pool.test_pool import open_pool, slots_bytes

SHAPE = FakeShape(num_layers=1, num_experts=12, top_k=3)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return FakeIndex(tmp_path_factory.mktemp("waves"), SHAPE)


@settings(max_examples=40)
@given(
    slots=st.integers(3, 12),
    warm=st.lists(st.integers(0, 11), unique=True, max_size=12),
    active=st.sets(st.integers(0, 11), min_size=1),
    policy=st.sampled_from(["lru", "lfu"]),
)
def test_every_expert_comes_once_pinned_and_with_its_own_bytes(index, slots, warm, active, policy):
    pool, _ = open_pool(
        index, expert_memory=slots_bytes(index, slots), read_threads=2, policy=policy
    )
    try:
        pool.preload([(0, e) for e in warm])
        pool.settle()
        pool.begin_step()
        assert pool.end_step().records_read == min(len(warm), slots)
        pool.begin_step()
        counts = np.zeros(12, dtype=np.int64)
        counts[sorted(active)] = 1
        seen: list[int] = []
        for group in pool.demand(0, counts, 1):
            assert (np.diff(group) > 0).all()
            assert group.size <= slots
            pool.residency.states.check_pinned(0, group)
            for expert, slot in zip(group, pool.residency.addresses.lookup(0, group), strict=True):
                for name, view in pool.residency.arena(0).views.items():
                    assert torch.equal(view[slot], index.weights[0][name][expert])
            seen += group.tolist()
        assert sorted(seen) == sorted(active)
        stats = pool.end_step()
        hits = len(active & set(warm[:slots]))
        assert (stats.demand_hits, stats.demand_misses) == (hits, len(active) - hits)
        assert stats.waves == -(-len(active) // slots)
        # What was resident is computed before it is overwritten, never read again.
        assert stats.records_read - len(active) + hits == 0
        pool.check_invariants()
    finally:
        pool.close()


def test_resident_experts_come_first(index):
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, 4))
    pool.preload([(0, e) for e in (9, 10, 11)])
    pool.settle()
    pool.begin_step()
    groups = [g.tolist() for g in pool.demand(0, np.ones(12, dtype=np.int64), 1)]
    pool.end_step()
    assert sorted(e for group in groups[:3] for e in group) == [9, 10, 11]
    pool.close()


def test_a_pass_that_is_broken_off_lets_go_of_its_pins(index):
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, 3))
    for turns in range(4):
        pool.begin_step()
        groups = iter(LayerPass(pool, 0, np.arange(12)))
        for _ in range(turns):
            next(groups)
        groups.close()
        pool.end_step()
        pool.settle()
        pool.check_invariants()
    pool.close()


def test_a_preload_under_way_is_awaited_not_read_twice(index):
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, 3), read_threads=1)
    pool.preload([(0, e) for e in (0, 1, 2)])
    pool.begin_step()
    counts = np.zeros(12, dtype=np.int64)
    counts[[1, 5, 6]] = 1
    seen = [e for group in pool.demand(0, counts, 1) for e in group.tolist()]
    assert sorted(seen) == [1, 5, 6]
    stats = pool.end_step()
    assert stats.records_read <= 5
    pool.settle()
    pool.check_invariants()
    pool.close()


def test_one_experts_rows_are_never_split(index, monkeypatch):
    model = FakeModel(index)
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 3))
    routed = random_routing(SHAPE, 50, 3)
    rows_of = np.bincount(routed[1].flatten(), minlength=12)
    products = []
    real = torch.mm
    monkeypatch.setattr(
        torch,
        "mm",
        lambda rows, weight, out: products.append(len(rows)) or real(rows, weight, out=out),
    )
    monkeypatch.setattr("expert_pool.grouped_linear._is_aligned", lambda rows, weight: False)
    pool.begin_step()
    model.layers[0](*routed)
    assert pool.end_step().waves == -(-np.count_nonzero(rows_of) // 3)
    assert sorted(products) == sorted([*rows_of[rows_of > 0]] * 2)
    pool.close()
