"""Slots go where they save reads: by counts, and only where chance does not explain them."""

import numpy as np
import pytest

from expert_pool import quotas
from expert_pool.eviction_rules import EvictionRules
from expert_pool.policies import LruPolicy, make_policy
from expert_pool.quotas import QuotaKeeper
from expert_pool.simulated_pool import SimulatedPool
from tests.synthetic_trace import synthetic_trace


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def misses_of_lru(demands, slots):
    held, misses = [], 0
    for expert in demands:
        misses += expert not in held
        held = ([*(e for e in held if e != expert), expert])[-slots:]
    return misses


def simulate(demands, layer_slots, move):
    """One layer a column; LRU."""
    layers, experts = demands.shape[1], int(demands.max()) + 1
    rules = EvictionRules(LruPolicy(layers, experts), layers, experts)
    pool = SimulatedPool([experts] * layers, [1] * layers, layer_slots, rules, move)
    for step in demands:
        for layer, expert in enumerate(step):
            pool.demand(layer, ids(expert), ids(1), 1)
        pool.end_step()
    return pool


def test_counters_are_the_misses_of_lru_with_a_slot_more_and_a_slot_less(monkeypatch):
    # LRU with a slot more holds all that LRU holds, so the counters can be exact.
    monkeypatch.setattr(quotas, "REVIEW_STEPS", 10**9)
    draw = np.random.default_rng(3)
    demands = draw.zipf(1.3, size=(3000, 1)).clip(max=12) - 1
    pool = simulate(demands, [5], move=True)
    by_slots = {slots: misses_of_lru(demands[:, 0].tolist(), slots) for slots in (4, 5, 6)}
    assert pool.misses == by_slots[5]
    assert pool._keeper.gains[0] == by_slots[5] - by_slots[6]
    assert pool._keeper.losses[0] == by_slots[4] - by_slots[5]


def test_slots_move_to_the_layer_that_uses_them():
    draw = np.random.default_rng(4)
    wide = draw.integers(0, 16, size=(2000, 2))
    narrow = draw.integers(0, 3, size=(2000, 2))
    demands = np.concatenate((wide, narrow), axis=1)
    moved, fixed = simulate(demands, [6] * 4, move=True), simulate(demands, [6] * 4, move=False)
    assert sum(moved.quotas) == 24
    assert moved.quotas[2:] == [3, 3]
    assert moved.misses < 0.85 * fixed.misses


def test_a_layer_with_a_slot_for_every_expert_gives_none_that_it_uses():
    """Layers of 8 and of 64 experts in one pool; what a whole layer would miss is known too."""
    experts, slots = [8, 8, 64, 64], [8, 8, 24, 24]
    draw = np.random.default_rng(0)
    skewed = np.arange(1, 65) ** -0.9
    chances = [np.full(8, 1 / 8)] * 2 + [skewed / skewed.sum()] * 2
    demands = [
        [np.sort(draw.choice(n, 2, False, p)) for n, p in zip(experts, chances, strict=True)]
        for _ in range(2000)
    ]
    pools = []
    for move, used in ((True, 8), (False, 8), (True, 3)):
        rules = EvictionRules(LruPolicy(4, 64), 4, 64)
        pools.append(SimulatedPool(experts, [2] * 4, slots, rules, move))
        for step in demands:
            for layer, chosen in enumerate(step):
                asked = np.unique(chosen % used) if layer < 2 else chosen
                pools[-1].demand(layer, asked, np.ones_like(asked), 1)
            pools[-1].end_step()
    moved, fixed, idle = pools
    assert moved.quotas == slots
    assert moved.misses == fixed.misses
    assert idle.quotas[:2] == [3, 3]


def test_equal_layers_keep_their_slots():
    trace = synthetic_trace(tokens=1200, layers=4, experts=32, top_k=4)
    rules = EvictionRules(make_policy("affinity", 4, 32), 4, 32)
    fixed_rules = EvictionRules(make_policy("affinity", 4, 32), 4, 32)
    moved = SimulatedPool([32] * 4, [4] * 4, [12] * 4, rules)
    fixed = SimulatedPool([32] * 4, [4] * 4, [12] * 4, fixed_rules, move_quotas=False)
    for step in trace.demands:
        for pool in (moved, fixed):
            for layer in range(4):
                pool.demand(layer, step[layer], np.ones_like(step[layer]), 1)
            pool.end_step()
    assert moved.misses <= 1.01 * fixed.misses


@pytest.mark.parametrize(
    ("groups", "quota", "floors", "widest"),
    [
        ((0, 1), (4, 4), (1, 1), 1),  # other slots
        ((0, 0), (8, 4), (1, 1), 1),  # the taker is full
        ((0, 0), (4, 4), (1, 4), 1),  # the giver has no more than it must have
        ((0, 0), (4, 4), (1, 1), 4),  # or needs them all in one step
    ],
)
def test_bounds_are_kept(groups, quota, floors, widest):
    keeper = QuotaKeeper(LruPolicy(2, 8), groups, floors, (8, 8))
    keeper.demanded(1, np.arange(widest), np.arange(0), 4, lambda: np.arange(0))
    for _ in range(quotas.REVIEW_STEPS):
        keeper.gains[0] = 1000.0
        assert keeper.review(quota) == []
    free = QuotaKeeper(LruPolicy(2, 8), (0, 0), (1, 1), (8, 8))
    free.gains[0] = 1000.0
    reviews = [free.review((4, 4)) for _ in range(quotas.REVIEW_STEPS)]
    assert reviews[-1] == [(1, 0)]
    assert not any(reviews[:-1])
