"""The optimum against dynamic programming over every choice of whom to evict."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_pool.oracle import (
    ABSENT,
    NEVER,
    ShadowWindow,
    as_one_cache,
    belady_misses,
    next_uses,
)


def padded(steps):
    """[steps, caches, width] from lists of lists of expert lists."""
    width = max((len(demand) for step in steps for demand in step), default=0)
    rows = [[sorted(d) + [ABSENT] * (width - len(d)) for d in step] for step in steps]
    return np.array(rows, dtype=np.int64).reshape(len(steps), len(steps[0]), width)


def fewest_misses(demands, capacity, start=frozenset()):
    """Over all choices of residents to keep, demanded ones always admitted."""

    @cache
    def best(step, residents):
        if step == len(demands):
            return 0
        demand = frozenset(demands[step])
        others = residents - demand
        room = capacity - len(demand)
        kept = [others] if len(others) <= room else map(frozenset, combinations(others, room))
        return len(demand - residents) + min(best(step + 1, demand | keep) for keep in kept)

    return best(0, frozenset(start))


EXPERTS = 6
demand_lists = st.lists(st.sets(st.integers(0, EXPERTS - 1), max_size=3), min_size=1, max_size=9)


@settings(max_examples=300, deadline=None)
@given(demands=demand_lists, capacity=st.integers(3, 5), start=st.sets(st.integers(0, 5)))
def test_misses_are_those_of_dynamic_programming(demands, capacity, start):
    start = frozenset(sorted(start)[:capacity])
    held = np.zeros((1, EXPERTS), dtype=bool)
    held[0, list(start)] = True
    found = belady_misses(padded([[d] for d in demands]), EXPERTS, capacity, held)
    assert found.sum() == fewest_misses(tuple(map(frozenset, demands)), capacity, start)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(*[st.sets(st.integers(0, 2), min_size=1, max_size=2)] * 2), min_size=1, max_size=5
    )
)
def test_one_cache_for_all_layers_is_optimal_too(steps):
    demands = padded([list(step) for step in steps])
    found = belady_misses(as_one_cache(demands, 3), 6, capacity=4)
    flat = [frozenset(layer * 3 + e for e in d) for step in steps for layer, d in enumerate(step)]
    assert found.sum() == fewest_misses(tuple(flat), 4)


def test_caches_do_not_see_each_other():
    draw = np.random.default_rng(5)
    demands = np.sort(draw.permuted(np.tile(np.arange(8), (40, 3, 1)), axis=2)[:, :, :3], axis=2)
    together = belady_misses(demands, 8, 5)
    for layer in range(3):
        alone = belady_misses(demands[:, layer : layer + 1], 8, 5)
        assert (together[:, layer] == alone[:, 0]).all()


def test_next_uses():
    found = next_uses(padded([[[0, 1]], [[1]], [[0]]]), 2)
    assert found[0, 0].tolist() == [2, 1]
    assert found[1:, 0, 0].tolist() == [NEVER, NEVER]


def test_a_step_larger_than_the_cache_has_no_optimum():
    with pytest.raises(ValueError, match="holds the experts of one step, found 2 for 3"):
        belady_misses(padded([[[0, 1, 2]]]), 4, 2)


def test_window_reports_regret_against_the_optimum_from_the_same_residents():
    shadow = ShadowWindow(layer=3, num_experts=4, window_steps=3)
    # LRU with two slots holding 0, 1: it throws 0 out for 2, the optimum 1.
    assert shadow.record(np.array([0, 1]), 2, np.array([2]), 1) is None
    assert shadow.record(np.array([1, 2]), 2, np.array([0]), 1) is None
    window = shadow.record(np.array([0, 2]), 2, np.array([2]), 0)
    assert window is not None
    assert (window.layer, window.misses, window.optimum()) == (3, 2, 1)
    assert shadow.record(np.array([0, 2]), 2, np.array([1]), 1) is None, "a new window began"


def test_window_ends_where_a_quota_moves_or_a_step_runs_in_waves():
    shadow = ShadowWindow(layer=0, num_experts=4, window_steps=10)
    assert shadow.record(np.array([0]), 2, np.array([1]), 1) is None
    window = shadow.record(np.array([0, 1]), 3, np.array([2]), 1)
    assert window is not None
    assert (window.capacity, window.misses, len(window.demands)) == (2, 1, 1)
    window = shadow.record(np.array([0, 1, 2]), 3, np.arange(4), 4)
    assert window is not None
    assert (window.capacity, window.misses, len(window.demands)) == (3, 1, 1)
    assert shadow.record(np.array([0]), 3, np.arange(4), 4) is None


@settings(max_examples=60, deadline=None)
@given(demands=demand_lists, seed=st.integers(0, 99))
def test_regret_of_a_demand_cache_is_never_negative(demands, seed):
    draw = np.random.default_rng(seed)
    shadow = ShadowWindow(layer=0, num_experts=EXPERTS, window_steps=len(demands))
    residents = set(draw.permutation(EXPERTS)[:3].tolist())
    window = None
    for demand in demands:
        misses = len(demand - residents)
        window = shadow.record(
            np.array(sorted(residents)), 4, np.array(sorted(demand), dtype=np.int64), misses
        )
        others = sorted(residents - demand)
        draw.shuffle(others)
        residents = demand | set(others[: 4 - len(demand)])
    assert window is not None
    assert window.misses >= window.optimum()
