import numpy as np
import pytest

from core.errors import CheckpointError
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


def test_saved_popularity_belongs_to_its_model(tmp_path):
    popularity = Popularity(2, 3, half_life_tokens=100)
    popularity.add(1, ids(0, 2), ids(1, 2), 3)
    path = tmp_path / "cache" / "popularity.npz"
    popularity.save(path, "abc")
    found = Popularity.load(path, "abc")
    assert found.half_life_tokens == 100
    assert found.counts == pytest.approx(popularity.counts)
    assert found.tokens == pytest.approx(popularity.tokens)
    assert [entry.name for entry in path.parent.iterdir()] == ["popularity.npz"]
    with pytest.raises(CheckpointError, match="expected coterie-popularity-1 of model content xyz"):
        Popularity.load(path, "xyz")


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_a_torn_file_is_named(tmp_path, keep):
    path = tmp_path / "popularity.npz"
    Popularity(2, 3, 100).save(path, "abc")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"popularity\.npz: not a popularity file"):
        Popularity.load(path, "abc")


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": None},
        {"tokens": None},
        {"half_life_tokens": None},
        {"counts": np.zeros(3)},
        {"counts": np.full((2, 3), "x")},
        {"counts": np.full((2, 3), np.nan)},
        {"counts": np.full((2, 3), np.inf)},
        {"counts": -np.ones((2, 3))},
        {"tokens": np.zeros(7)},
        {"tokens": np.full(2, np.nan)},
        {"half_life_tokens": np.array(0.0)},
        {"half_life_tokens": np.array(np.nan)},
        {"half_life_tokens": np.zeros(2)},
    ],
    ids=str,
)
def test_a_file_whose_values_are_damaged_is_refused_like_any_other(tmp_path, changes):
    path = tmp_path / "popularity.npz"
    Popularity(2, 3, 100).save(path, "abc")
    with np.load(path) as stored:
        values = {**stored, **changes}
    np.savez(path, **{name: value for name, value in values.items() if value is not None})
    with pytest.raises(CheckpointError, match="damaged popularity file"):
        Popularity.load(path, "abc")


def test_an_array_in_place_of_the_file_is_refused(tmp_path):
    path = tmp_path / "popularity.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(CheckpointError, match="not a popularity file"):
        Popularity.load(path, "abc")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "popularity.npz"
    Popularity(1, 2, 100).save(path, "abc")
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        Popularity(1, 2, 50).save(path, "abc")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["popularity.npz"]
