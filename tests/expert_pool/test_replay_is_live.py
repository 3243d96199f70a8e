"""Replay and the live pool make identical decisions, in decode, prefill and crowded steps."""

import numpy as np
import pytest
import torch

from expert_pool import quotas
from expert_pool.eviction_rules import EvictionRules
from expert_pool.policies import POLICIES, make_policy
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from expert_pool.simulated_pool import SimulatedPool
from tests.expert_pool.fake_experts import FakeIndex, FakeModel, FakeShape
from tests.synthetic_trace import synthetic_trace

LAYERS, EXPERTS, TOP_K = 4, 16, 3
ROWS = (1, 1, 1, 1, 2, 1, 1, 24, 1, 1, 5, 1)
"""Rows of a step, over and over: decode, small batches, and prompts that outnumber the slots."""


class Recorder:
    """By step: what a live pool was asked and which slots it moved, each with who left for it."""

    def __init__(self, pool, monkeypatch):
        self.steps = []
        self.left = []
        demand, evict = pool.demand, pool.residency._evict
        move = pool.residency.move_quota

        def demand_and_note(layer, counts, tokens, in_order=False, weights=None, rows=None):
            given = weights()
            active = np.flatnonzero(counts)
            self.left = []
            asked = (layer, active, counts[active], tokens, given[active])
            self.steps[-1][0].append((asked, self.left))
            return demand(layer, counts, tokens, in_order, lambda: given, rows)

        def evict_and_note(layer, expert):
            self.left.append(expert)
            evict(layer, expert)

        def move_and_note(source, target, slots):
            self.left = []
            self.steps[-1][1].append((source, target, self.left))
            move(source, target, slots)

        monkeypatch.setattr(pool, "demand", demand_and_note)
        monkeypatch.setattr(pool.residency, "_evict", evict_and_note)
        monkeypatch.setattr(pool.residency, "move_quota", move_and_note)


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_makes_the_decisions_of_the_live_pool(tmp_path, monkeypatch, policy, hot):
    monkeypatch.setattr(quotas, "REVIEW_STEPS", 8)
    monkeypatch.setattr(quotas, "_SIGMAS", -2.0)
    shape = FakeShape(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, hidden=16, width=8)
    index = FakeIndex(tmp_path, shape)
    hot_set = {1: [5], 2: [0, 7]} if hot else {}
    settings = PoolSettings(
        expert_memory=7 * sum(layer.slot_bytes for layer in index.layers),
        policy=policy,
        hysteresis=3.0,
        hot_set=hot_set,
        prefetch="off",
        read_threads=3,
    )
    pool, model = ExpertPool(index, settings), FakeModel(index)
    pool.settle()
    pool.attach(model)
    trace = synthetic_trace(tokens=700, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=4)
    ids = torch.from_numpy(trace.demands)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    record = Recorder(pool, monkeypatch)
    misses = evictions = row = step = crowded = 0
    while row < len(ids):
        rows = ROWS[step % len(ROWS)]
        record.steps.append(([], []))
        pool.begin_step()
        for layer in range(LAYERS):
            chosen, given = ids[row : row + rows, layer], weights[row : row + rows, layer]
            crowded += len(chosen.unique()) > pool.residency.quotas[layer]
            model.layers[layer](torch.randn(len(chosen), 16), chosen, given)
        stats = pool.end_step()
        misses += stats.demand_misses
        evictions += stats.evictions
        row, step = row + rows, step + 1
    pool.check_invariants()
    quotas_of_pool = list(pool.residency.quotas)
    pool.close()

    rules = EvictionRules(make_policy(policy, LAYERS, EXPERTS), LAYERS, EXPERTS, 3.0)
    hot_arrays = {layer: np.array(experts) for layer, experts in hot_set.items()}
    again = SimulatedPool(
        [EXPERTS] * LAYERS, [TOP_K] * LAYERS, [7] * LAYERS, rules, hot_set=hot_arrays
    )
    for layer, experts in hot_arrays.items():
        again._resident[layer][experts] = True
    for asks, moves in record.steps:
        for asked, left in asks:
            assert again.demand(*asked) == left
        assert again.end_step() == moves
    assert again.misses == misses
    assert again.quotas == quotas_of_pool
    moved = sum(len(moves) for _, moves in record.steps)
    assert min(crowded, evictions, moved) > 5
