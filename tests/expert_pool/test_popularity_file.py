import numpy as np
import pytest

from core.errors import CheckpointError
from expert_pool import popularity_file
from expert_pool.popularity import Popularity
from expert_pool.popularity_file import MAX_DOMAINS, StoredUse


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def use(*arguments):
    return StoredUse(Popularity(*arguments))


def test_saved_popularity_belongs_to_its_model(tmp_path):
    popularity = Popularity(2, 3, half_life_tokens=100)
    popularity.add(1, ids(0, 2), ids(1, 2), 3)
    path = tmp_path / "cache" / "popularity.npz"
    popularity_file.save(StoredUse(popularity), path, "abc")
    found = popularity_file.load(path, "abc").everyone
    assert found.half_life_tokens == 100
    assert found.counts == pytest.approx(popularity.counts)
    assert found.tokens == pytest.approx(popularity.tokens)
    assert [entry.name for entry in path.parent.iterdir()] == ["popularity.npz"]
    with pytest.raises(CheckpointError, match="expected coterie-popularity-2 of model content xyz"):
        popularity_file.load(path, "xyz")


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_a_torn_file_is_named(tmp_path, keep):
    path = tmp_path / "popularity.npz"
    popularity_file.save(use(2, 3, 100), path, "abc")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"popularity\.npz: not a popularity file"):
        popularity_file.load(path, "abc")


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
        {"counts": np.full((2, 3), 1e39)},
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
    popularity_file.save(use(2, 3, 100), path, "abc")
    with np.load(path) as stored:
        values = {**stored, **changes}
    np.savez(path, **{name: value for name, value in values.items() if value is not None})
    with pytest.raises(CheckpointError, match="damaged popularity file"):
        popularity_file.load(path, "abc")


def test_an_array_in_place_of_the_file_is_refused(tmp_path):
    path = tmp_path / "popularity.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(CheckpointError, match="not a popularity file"):
        popularity_file.load(path, "abc")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "popularity.npz"
    popularity_file.save(use(1, 2, 100), path, "abc")
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        popularity_file.save(use(1, 2, 50), path, "abc")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["popularity.npz"]


def test_domains_come_back_and_those_with_the_fewest_tokens_go(tmp_path):
    path = tmp_path / "popularity.npz"
    stored = use(2, 3, 100)
    for number in range(MAX_DOMAINS + 2):
        domain = stored.domains[f"domain {number}"] = Popularity(2, 3, 100)
        domain.add_all(np.full((2, 3), number), np.full(2, 1.0 + number))
    popularity_file.save(stored, path, "abc")
    found = popularity_file.load(path, "abc").domains
    assert set(found) == {f"domain {number}" for number in range(2, MAX_DOMAINS + 2)}
    assert found["domain 7"].counts.tolist() == [[7, 7, 7]] * 2
    assert found["domain 7"].tokens.tolist() == [8, 8]


def test_a_file_of_the_version_without_domains_is_read(tmp_path):
    path = tmp_path / "popularity.npz"
    popularity_file.save(use(2, 3, 100), path, "abc")
    with np.load(path) as stored:
        values = {name: stored[name] for name in stored.files if "domain" not in name}
    np.savez(path, **{**values, "format": "coterie-popularity-1"})
    found = popularity_file.load(path, "abc")
    assert found.everyone.half_life_tokens == 100
    assert found.domains == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"domains": None},
        {"domains": np.array(["a", "b"])},
        {"domains": np.array([1.0])},
        {"domain_counts": np.zeros((1, 2, 4))},
        {"domain_counts": np.full((1, 2, 3), np.nan)},
        {"domain_tokens": -np.ones((1, 2))},
        {"domain_tokens": np.ones(1)},
    ],
    ids=str,
)
def test_damaged_domains_are_refused(tmp_path, changes):
    path = tmp_path / "popularity.npz"
    stored = use(2, 3, 100)
    stored.domains["law"] = Popularity(2, 3, 100)
    popularity_file.save(stored, path, "abc")
    with np.load(path) as found:
        values = {**found, **changes}
    np.savez(path, **{name: value for name, value in values.items() if value is not None})
    with pytest.raises(CheckpointError, match="damaged popularity file"):
        popularity_file.load(path, "abc")
