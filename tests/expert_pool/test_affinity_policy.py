"""The project's own policy: better than the others, fast, exact to repeat."""

import os
from pathlib import Path

import numpy as np
import pytest

from expert_pool.affinity_policy import DISCOUNT, HORIZON, AffinityPolicy
from expert_pool.oracle import belady_misses
from expert_pool.policies import LfuPolicy, LruPolicy
from expert_pool.replay import replay_policy
from expert_pool.routing_trace import RoutingTrace
from tests.synthetic_trace import synthetic_trace


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def misses(policy, trace, capacities):
    found = replay_policy(policy, trace.demands, trace.num_experts, capacities)
    return np.array([number for number, _ in found])


def gaps(trace, capacities):
    """(share of the gap from LFU to the optimum that is closed, hit rate above LRU's)."""
    layers, experts = trace.demands.shape[1], trace.num_experts
    own = misses(AffinityPolicy(layers, experts), trace, capacities)
    lfu = misses(LfuPolicy(layers, experts), trace, capacities)
    lru = misses(LruPolicy(layers, experts), trace, capacities)
    best = np.array([belady_misses(trace.demands, experts, c).sum() for c in capacities])
    return (lfu - own) / (lfu - best), (lru - own) / trace.accesses


@pytest.mark.parametrize(
    "shape",
    [
        {"experts": 64, "top_k": 8, "layers": 3, "seed": 1},
        {"experts": 128, "top_k": 8, "layers": 3, "seed": 2, "tokens": 600},
        {"experts": 16, "top_k": 2, "seed": 3},
        {"document_tokens": 900, "memory": 0.9, "seed": 5},
    ],
)
def test_it_closes_part_of_the_gap_on_traces_of_many_shapes(shape):
    # A few hundred tokens of three or four layers: little to learn from. See docs/policies.md.
    trace = synthetic_trace(**shape)
    closed, above_lru = gaps(trace, [trace.num_experts // 4, trace.num_experts // 2])
    assert closed.min() > 0.02
    assert closed.mean() >= 0.045
    assert above_lru.min() >= -0.002


def test_routing_without_any_pattern_costs_next_to_nothing():
    # Nothing can be learned from it: every policy is as good as chance.
    draw = np.random.default_rng(8)
    expert_ids = draw.permuted(np.tile(np.arange(32), (600, 3, 1)), axis=2)[:, :, :4]
    closed, above_lru = gaps(RoutingTrace.of("noise", expert_ids, 32), [8, 16])
    assert closed.min() > -0.05
    assert above_lru.min() > -0.01


def test_a_shift_of_all_traffic_is_followed():
    one, two = (synthetic_trace(tokens=500, seed=s) for s in (10, 11))
    both = RoutingTrace.of("shift", np.concatenate((one.demands, two.demands)), 64)
    closed, above_lru = gaps(both, [12, 24])
    assert closed.min() >= 0.05
    assert above_lru.min() >= -0.002


def test_it_learns_who_comes_after_whom():
    # Experts take turns: 0 1 2 ... 7. Of the others, the one longest unused comes next: what LRU
    # and LFU evict, each time.
    policy = AffinityPolicy(1, 8)
    for token in range(400):
        policy.touch(0, ids(token % 8), ids(1), 1)
    last = 399 % 8
    order = policy.victims(0, np.array([e for e in range(8) if e != last]), 7)
    assert order[-1] == (last + 1) % 8
    assert order[0] == (last - 1) % 8


def test_before_anything_is_known_the_recent_and_frequent_stay():
    policy = AffinityPolicy(1, 4)
    policy.touch(0, ids(0), ids(1), 1)
    policy.touch(0, ids(1), ids(1), 1)
    policy.touch(0, ids(2), ids(1), 1)
    assert policy.victims(0, ids(0, 1, 2, 3), 4).tolist() == [3, 0, 1, 2]
    assert policy.victims(0, ids(0, 1), 1).tolist() == [0]
    assert policy.victims(0, ids(0, 1), 0).size == 0
    assert policy.victims(0, ids(), 1).size == 0


def test_estimates_are_those_of_the_formula():
    # One expert used by every second touch, alone in its layer: V right after a use is DISCOUNT.
    policy = AffinityPolicy(1, 3)
    for token in range(800):
        policy.touch(0, ids(token % 2), ids(1), 1)
    scores = policy._scores[0]
    assert scores[0] == pytest.approx(1.0, abs=0.05)
    assert scores[1] == pytest.approx(DISCOUNT, abs=0.05)
    assert scores[2] == pytest.approx(0.0, abs=0.05)


def test_the_same_calls_give_the_same_decisions():
    trace = synthetic_trace(tokens=200)
    orders = []
    for _ in range(2):
        policy = AffinityPolicy(4, 64)
        for step in range(200):
            for layer in range(4):
                demand = trace.demands[step, layer]
                policy.touch(layer, demand, np.ones_like(demand), 1)
        orders.append([policy.victims(layer, np.arange(64), 64).tolist() for layer in range(4)])
    assert orders[0] == orders[1]


def test_layers_share_weights_but_not_experts():
    policy = AffinityPolicy(2, 4)
    for _ in range(3 * HORIZON):
        policy.touch(0, ids(0), ids(1), 1)
    assert not policy._scores[1].any()
    assert policy.victims(1, ids(0, 1, 2, 3), 2).tolist() == [0, 1]


def test_batches_prefills_and_empty_steps_are_taken():
    draw = np.random.default_rng(1)
    policy = AffinityPolicy(2, 32)
    for step in range(200):
        for layer in range(2):
            size = int(draw.integers(0, 33)) if step % 5 else 32
            experts = np.sort(draw.permutation(32)[:size])
            policy.touch(layer, experts, draw.integers(1, 500, size), 4096 if size == 32 else size)
    assert np.isfinite(policy._scores).all()
    assert np.isfinite(policy._table).all()
    assert np.abs(policy._scores).max() < 2


@pytest.mark.parametrize(("experts", "rows"), [(64, 128), (128, 256), (256, 28), (512, 28)])
def test_the_table_is_bounded(experts, rows):
    policy = AffinityPolicy(1, experts)
    assert policy._table.shape == (1, rows, experts)
    draw = np.random.default_rng(2)
    for _ in range(30):
        demand = np.sort(draw.permutation(experts)[:8])
        policy.touch(0, demand, np.ones_like(demand), 1)
    assert np.isfinite(policy._scores).all()


@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set")
@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("esft_lite_intent.npz", 600, 0.25),
        ("esft_lite_law.npz", 600, 0.1),
        ("qwen3_30b_a3b.route.csv", 156, 0.05),
    ],
)
def test_on_recorded_traces(name, steps, expected):
    whole = RoutingTrace.read(Path(os.environ["COTERIE_DATA"]) / "routing" / name)
    # Some layers and the first steps, to be quick: docs/policies.md has the whole.
    trace = RoutingTrace.of(name, whole.demands[:steps, ::6], whole.num_experts)
    closed, above_lru = gaps(trace, [12, 24])
    assert closed.mean() >= expected
    assert above_lru.min() >= -0.002
