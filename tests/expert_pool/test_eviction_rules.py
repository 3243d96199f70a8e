"""Hysteresis by the router's scores, over any policy."""

import numpy as np
import pytest

from expert_pool.eviction_rules import RETURNED_WITHIN, SCORE_DECAY, EvictionRules
from expert_pool.policies import LruPolicy


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def make(hysteresis=2.0, experts=4):
    return EvictionRules(LruPolicy(2, experts), 2, experts, hysteresis)


def touch(rules, *experts, weights=None, tokens=1, layer=0):
    rules.touch(layer, ids(*experts), np.ones(len(experts), np.int64), tokens, weights)


def test_whom_the_router_favours_leaves_last():
    rules = make()
    for _ in range(30):
        touch(rules, 0)
    for expert in (1, 2, 3):
        touch(rules, expert)
    # The longest unused, and yet: its smoothed share is 0.95 ** 3 * (1 - 0.95 ** 30), above 2 / 4.
    assert rules.victims(0, ids(0, 1, 2), 2).tolist() == [1, 2]
    assert rules.victims(0, ids(0, 1, 2), 3).tolist() == [1, 2, 0]
    assert rules.victims(0, ids(0), 1).tolist() == [0]
    assert rules.victims(0, ids(0, 1), 0).size == 0
    for _ in range(40):
        touch(rules, 3)
    assert rules.victims(0, ids(0, 1, 2), 1).tolist() == [0]


def test_scores_are_shares_of_the_routers_weight_smoothed_over_tokens():
    rules = make()
    touch(rules, 0, 1, weights=np.array([6.0, 2.0]), tokens=4)
    kept = SCORE_DECAY**4
    expected = [0.75 * (1 - kept), 0.25 * (1 - kept), 0, 0]
    assert rules._scores[0].tolist() == pytest.approx(expected)
    touch(rules, 2, weights=np.array([0.5]))
    assert rules._scores[0].tolist() == pytest.approx(
        [*(s * SCORE_DECAY for s in expected[:2]), 1 - SCORE_DECAY, 0]
    )
    assert not rules._scores[1].any()
    touch(rules, 2, weights=np.array([0.0]))
    assert np.isfinite(rules._scores).all()


def test_without_hysteresis_the_policy_decides():
    rules = make(hysteresis=0)
    assert not rules.wants_weights
    for expert in (0, 0, 0, 1, 2):
        touch(rules, expert)
    assert rules.victims(0, ids(0, 1, 2), 3).tolist() == [0, 1, 2]
    assert rules._scores.size == 0


def test_experts_that_come_back_at_once_are_counted():
    rules = make()
    touch(rules, 0)
    rules.evicted(0, 3)
    rules.evicted(0, 2)
    touch(rules, 3)
    rules.missed(0, ids(3))
    assert rules.returns == 1
    for _ in range(RETURNED_WITHIN):
        touch(rules, 1)
    rules.missed(0, ids(2))
    rules.missed(1, ids(3))
    assert rules.returns == 1
    rules.evicted(0, 1)
    assert len(rules._gone[0]) == 1


def test_scores_stay_shares_whatever_the_router_weighs():
    rules = make()
    touch(rules, 0, 1, weights=np.array([3e39, 1e39]))
    assert rules._scores[0].tolist() == pytest.approx([0.0375, 0.0125, 0, 0])


def test_an_even_share_is_that_of_the_layer():
    """In a pool with layers of 4 and of 64 experts."""
    rules = EvictionRules(LruPolicy(2, 64), 2, [4, 64], 8.0)
    for layer in (0, 1):
        for _ in range(5):
            touch(rules, 0, layer=layer)
        for expert in (1, 2):
            touch(rules, expert, layer=layer)
    # A share of about 0.2: less than 8 quarters, more than 8 sixty-fourths.
    assert rules.victims(0, ids(0, 1, 2), 3).tolist() == [0, 1, 2]
    assert rules.victims(1, ids(0, 1, 2), 3).tolist() == [1, 2, 0]
