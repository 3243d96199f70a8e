import numpy as np
import pytest

from expert_pool.popularity import Popularity


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def test_counts_halve_over_a_half_life_of_their_own_layer():
    popularity = Popularity(2, 4, half_life_tokens=10)
    popularity.add(0, ids(1, 2), ids(8, 4), 10)
    popularity.add(1, ids(1), ids(3), 1)
    popularity.add(0, ids(2), ids(1), 10)
    assert popularity.counts[0].tolist() == [0, 4, 3, 0]
    assert popularity.counts[1].tolist() == [0, 3, 0, 0]
    assert popularity.tokens.tolist() == [15, 1]


def test_rates_are_shares_of_tokens():
    popularity = Popularity(1, 3, half_life_tokens=1000)
    assert popularity.rates(0).tolist() == [0, 0, 0]
    for _ in range(50):
        popularity.add(0, ids(0, 2), ids(4, 2), 4)
    assert popularity.rates(0) == pytest.approx([1, 0, 0.5])


def test_hottest_leaves_out_what_was_never_used_and_breaks_ties_downwards():
    popularity = Popularity(1, 5, half_life_tokens=10)
    popularity.add(0, ids(1, 3, 4), ids(2, 5, 2), 5)
    assert popularity.hottest(0, 2).tolist() == [3, 1]
    assert popularity.hottest(0, 5).tolist() == [3, 1, 4]


def test_hot_list_goes_by_rate_over_layers():
    popularity = Popularity(2, 3, half_life_tokens=1000)
    popularity.add(0, ids(0, 1), ids(9, 1), 10)
    popularity.add(1, ids(2, 0), ids(5, 4), 10)
    assert popularity.hot_list(ids(2, 1)) == [(0, 0), (1, 2), (0, 1)]


def test_merge_weighs():
    one, two = Popularity(1, 2, 10), Popularity(1, 2, 10)
    one.add(0, ids(0), ids(2), 2)
    two.add(0, ids(1), ids(4), 4)
    one.merge(two, weight=0.5)
    assert one.counts.tolist() == [[2, 2]]
    assert one.tokens.tolist() == [4]
    with pytest.raises(ValueError, match="belongs to one model"):
        one.merge(Popularity(1, 3, 10))


def test_a_very_long_step_forgets_all_before_it():
    popularity = Popularity(1, 2, half_life_tokens=1)
    popularity.add(0, ids(0), ids(5), 5)
    popularity.add(0, ids(1), ids(100_000), 100_000)
    assert popularity.hottest(0, 1).tolist() == [1]
    assert np.isfinite(popularity.counts).all()
