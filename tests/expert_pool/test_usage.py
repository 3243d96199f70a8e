"""Popularity kept by model content; a new replica's hot list is there before it is ready."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from core.cache_folder import cache_folder
from expert_pool import popularity_file
from expert_pool.tables import State
from expert_pool.usage import SAVE_EVERY_S, Usage, warm_up
from tests.expert_pool.fake_experts import FakeIndex, FakeShape, FaultyReader
from tests.expert_pool.test_pool import open_pool, slots_bytes

SHAPE = FakeShape(num_layers=2, num_experts=10, top_k=2)


@pytest.fixture
def index(tmp_path):
    return FakeIndex(tmp_path / "model", SHAPE)


def use(pool, layer: int, experts: dict[int, int]) -> None:
    counts = np.zeros(10, dtype=np.int64)
    for expert, times in experts.items():
        counts[expert] = times
    pool.begin_step()
    groups = iter(pool.demand(layer, counts, int(counts.sum()) // 2))
    for _ in groups:
        pass
    pool.end_step()


def resident(pool, layer: int) -> set[int]:
    return set(np.flatnonzero(pool.residency.states.state[layer] == State.RESIDENT).tolist())


def test_a_new_pool_holds_what_was_used_most_before_it_is_asked(index):
    pool, _ = open_pool(index)
    use(pool, 0, {3: 20, 5: 10, 7: 1})
    use(pool, 1, {1: 4, 2: 2})
    pool.close()
    reader = FaultyReader(index)
    pool, _ = open_pool(index, reader, expert_memory=slots_bytes(index, 2))
    warm_up(pool, 5.0)
    assert resident(pool, 0) == {3, 5}
    assert resident(pool, 1) == {1, 2}
    # The most used over all layers came first.
    assert reader.reads[0] == (0, 3)
    pool.close()


def test_runs_add_up_and_nothing_is_counted_twice(index):
    for _ in range(2):
        pool, _ = open_pool(index)
        use(pool, 0, {3: 6, 4: 2})
        pool.usage.save(pool.loads)
        pool.usage.save(pool.loads)
        pool.close()
    known = popularity_file.load(pool.usage.path, index.content_key).everyone
    assert known.counts[0, 3] == pytest.approx(12, rel=1e-3)
    assert known.tokens[0] == pytest.approx(8, rel=1e-3)


def test_m16_two_models_are_never_mixed(index, tmp_path):
    """MoE-Infinity README: two models in one cache folder."""
    other = FakeIndex(tmp_path / "other", SHAPE, seed=1)
    pool, _ = open_pool(index)
    use(pool, 0, {3: 6})
    pool.close()
    pool, _ = open_pool(other)
    assert pool.usage.hot_list(np.array([2, 2])) == []
    use(pool, 0, {8: 2})
    pool.close()
    assert Usage(index, lambda: 0.0).hot_list(np.array([2, 2])) == [(0, 3)]


def test_it_is_saved_now_and_then(index):
    now = [0.0]
    pool, _ = open_pool(index, clock=lambda: now[0])
    use(pool, 0, {3: 6})
    assert not pool.usage.path.exists()
    now[0] = SAVE_EVERY_S
    use(pool, 0, {3: 6})
    assert pool.usage.path.exists()
    pool.close()


def test_a_start_waits_no_longer_than_it_may(index):
    pool, _ = open_pool(index)
    use(pool, 0, {3: 20, 5: 10})
    pool.close()

    class SlowReader(FaultyReader):
        def read(self, file, offset, into):
            slow.wait(5)
            super().read(file, offset, into)

    slow = threading.Event()
    pool, _ = open_pool(index, SlowReader(index), expert_memory=slots_bytes(index, 2))
    assert 0.05 <= warm_up(pool, 0.05) < 1.0
    slow.set()
    pool.settle()
    assert resident(pool, 0) == {3, 5}
    pool.close()


@pytest.mark.parametrize("content", [b"", b"PK garbage", None])
def test_a_damaged_file_is_left_aside(index, content, caplog):
    pool, _ = open_pool(index)
    use(pool, 0, {3: 6})
    pool.close()
    raw = pool.usage.path.read_bytes()
    pool.usage.path.write_bytes(raw[: len(raw) // 2] if content is None else content)
    pool, _ = open_pool(index)
    assert pool.usage.hot_list(np.array([2, 2])) == []
    use(pool, 0, {4: 6})
    pool.close()
    assert pool.usage.hot_list(np.array([2, 2])) == [(0, 4)]


def test_a_cache_folder_that_may_not_be_looked_into_stops_nothing(index, monkeypatch):
    """As a home folder of another user: there `Path.exists` raises. Checksums look there too."""
    look = Path.stat

    def refuse(path, **options):
        if path.is_relative_to(cache_folder()):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    pool, _ = open_pool(index)
    warm_up(pool, 1.0)
    use(pool, 0, {3: 6})
    pool.close()


def test_a_full_disk_is_a_warning_and_leaves_the_old_file(index, monkeypatch, caplog):
    pool, _ = open_pool(index)
    use(pool, 0, {3: 6})
    pool.close()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(popularity_file.np, "savez", full)
    pool, _ = open_pool(index)
    use(pool, 0, {4: 60})
    with caplog.at_level(logging.WARNING):
        pool.close()
    assert "No space left" in caplog.text
    assert pool.usage.hot_list(np.array([2, 2])) == [(0, 3)]


def test_without_it_nothing_is_kept(index):
    pool, _ = open_pool(index, hot_start_s=0)
    use(pool, 0, {3: 6})
    warm_up(pool, 0.0)
    pool.close()
    assert not Usage(index, lambda: 0.0).path.exists()


def test_two_replicas_that_save_at_once_lose_nothing(index, monkeypatch):
    ours, theirs = Usage(index, lambda: 0.0), Usage(index, lambda: 0.0)
    loads = np.zeros((2, 10), dtype=np.int64)
    loads[0, 3] = 4
    load = Usage.known
    others = []

    def load_while_another_saves(usage):
        found = load(usage)
        if usage is ours:
            others.append(threading.Thread(target=theirs.save, args=(loads,)))
            others[0].start()
            others[0].join(0.05)
        return found

    monkeypatch.setattr(Usage, "known", load_while_another_saves)
    ours.save(loads)
    others[0].join()
    known = popularity_file.load(ours.path, index.content_key).everyone
    assert known.counts[0, 3] == pytest.approx(8, rel=1e-3)


def test_a_replica_that_hangs_while_it_saves_holds_nobody_up(index, monkeypatch, caplog):
    monkeypatch.setattr("expert_pool.usage._PATIENCE_S", 0.05)
    usage, hanging = Usage(index, lambda: 0.0), Usage(index, lambda: 0.0)
    loads = np.ones((2, 10), dtype=np.int64)
    with hanging._my_turn() as mine:
        assert mine
        usage.save(loads)
    assert not usage.path.exists()
    assert "being written by another process" in caplog.text
    usage.save(loads)
    assert usage.path.exists()
