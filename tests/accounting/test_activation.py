"""Activation figures on routing whose answers are known by hand."""

import numpy as np
import pytest

from accounting.activation import (
    distinct_experts,
    expected_distinct_experts,
    knee,
    loads,
    overlap,
    router_entropy,
    sequence_activation_ratio,
    top_share,
)

IDS = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 3]]])
"""Two tokens, two layers, top 2 of 4."""


def test_loads_belong_to_their_layer():
    assert loads(IDS, 4).tolist() == [[2, 1, 1, 0], [0, 0, 2, 2]]


def test_a_sequence_activates_what_it_used_at_least_once():
    assert sequence_activation_ratio(IDS, 4) == 5 / 8


def test_entropy_is_1_for_an_even_load_and_0_for_one_expert():
    assert router_entropy(np.array([3, 3, 3, 3])) == pytest.approx(1.0)
    assert router_entropy(np.array([0, 9, 0, 0])) == 0.0
    assert router_entropy(np.zeros(4, dtype=int)) == 0.0


def test_top_share_counts_at_least_one_expert():
    load = np.array([1, 6, 2, 1])
    assert top_share(load, 10) == 0.6
    assert top_share(load, 50) == 0.8
    assert top_share(load, 100) == 1.0


def test_distinct_experts_grow_to_all_that_were_seen():
    assert distinct_experts(IDS, 4, 1, 200, 0) == 2.0
    assert distinct_experts(IDS, 4, 64, 50, 0) == 2.5
    assert expected_distinct_experts(4, 2, 1) == 2.0
    assert expected_distinct_experts(4, 2, 2) == 3.0


def test_even_draws_meet_the_formula():
    random = np.random.default_rng(1)
    ids = np.array([[random.choice(64, 8, replace=False)] for _ in range(4000)])
    seen = distinct_experts(ids, 64, 16, 300, 0)
    assert seen == pytest.approx(expected_distinct_experts(64, 8, 16), rel=0.02)


def test_overlap_compares_the_busiest():
    one, other = np.array([[9, 8, 1, 0]]), np.array([[9, 0, 8, 1]])
    assert overlap(one, one, 50) == 1.0
    assert overlap(one, other, 50) == 0.5


def test_the_knee_is_where_one_more_costs_twice():
    assert knee([32, 256, 2048], [10, 12, 40]) is None
    assert knee([10, 20, 30], [1, 2, 10]) == 20
    assert knee([10, 20, 30], [5, 5, 5]) is None
