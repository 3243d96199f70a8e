"""The tier below the slots: shared memory beside a device, the page cache on a CPU machine.

A second arena in CPU memory stands for the device.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from expert_pool import host_tier, store
from expert_pool.host_tier import HostTier
from expert_pool.page_cache import PageCacheReader
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from expert_pool.store import KEEP_REST_S
from expert_pool.tiers import open_host_tier, open_reader
from tests.expert_pool.fake_experts import (
    FakeIndex,
    FakeModel,
    FakeShape,
    FaultyReader,
    random_routing,
)
from tests.expert_pool.test_pool import slots_bytes

SHAPE = FakeShape(num_layers=2, num_experts=8, top_k=2)


@pytest.fixture
def index(tmp_path):
    return FakeIndex(tmp_path / "model", SHAPE)


def open_tier(index: FakeIndex, slots: int = 16) -> HostTier:
    size = index.layers[0].slot_bytes
    return HostTier(index, "float32", slots * size, index.model_dir.parent / "shm")


def image(index: FakeIndex, number: int) -> np.ndarray:
    size = index.layers[0].slot_bytes
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def fetched(tier: HostTier, index: FakeIndex, layer: int, expert: int) -> np.ndarray | None:
    into = np.zeros(index.layers[0].slot_bytes, dtype=np.uint8)
    return into if tier.fetch(layer, expert, into, None) else None


def open_staged(index, tier, reader=None, **settings) -> tuple[ExpertPool, FakeModel]:
    chosen = PoolSettings(**{"expert_memory": slots_bytes(index, 2), **settings})
    pool = ExpertPool(index, chosen, reader=reader or FaultyReader(index), host_tier=tier)
    model = FakeModel(index)
    pool.attach(model)
    return pool, model


def run(pool, model, steps: int = 4):
    stats = []
    for step in range(steps):
        pool.begin_step()
        for layer in range(2):
            routed = random_routing(SHAPE, 6, step + layer)
            assert torch.equal(model.layers[layer](*routed), model.stock(layer, *routed))
        stats.append(pool.end_step())
    return stats


@pytest.mark.parametrize("transformed", [False, True])
def test_an_expert_is_read_from_disk_once_whatever_the_number_of_slots(tmp_path, transformed):
    index = FakeIndex(tmp_path / "model", FakeShape(num_experts=8, transformed=transformed))
    reader = FaultyReader(index)
    pool, model = open_staged(index, open_tier(index), reader, read_threads=1)
    stats = run(pool, model, 8)
    for one in stats:
        assert one.records_read + one.host_records == one.demand_misses
        assert one.host_bytes == one.host_records * index.record_bytes
    assert sum(one.host_records for one in stats) > 0
    assert len(reader.reads) == len(set(reader.reads))
    pool.close()


def test_it_outlives_its_pools_and_the_next_one_reads_nothing(index):
    pool, model = open_staged(index, open_tier(index))
    run(pool, model)
    pool.close()
    reader = FaultyReader(index)
    pool, model = open_staged(index, open_tier(index), reader)
    run(pool, model)
    assert reader.reads == []
    pool.close()


def test_the_longest_unused_makes_room(index):
    tier = open_tier(index, slots=3)
    for expert in range(3):
        assert tier.keep(0, expert, image(index, expert), None)
    assert fetched(tier, index, 0, 0) is not None
    tier.keep(1, 5, image(index, 9), None)
    assert tier.num_kept == 3
    assert fetched(tier, index, 0, 1) is None
    for layer, expert, number in ((0, 0, 0), (0, 2, 2), (1, 5, 9)):
        assert np.array_equal(fetched(tier, index, layer, expert), image(index, number))
    assert tier.path.stat().st_size == tier.capacity_bytes == 3 * index.layers[0].slot_bytes
    tier.close()


def test_bytes_that_are_not_those_on_disk_are_not_taken(index):
    tier = open_tier(index)
    tier.keep(0, 3, image(index, 3), on_disk=77)
    into = np.zeros(index.layers[0].slot_bytes, dtype=np.uint8)
    assert tier.fetch(0, 3, into, expected=77)
    assert not tier.fetch(0, 3, into, expected=78)
    tier.close()


def test_a_damaged_image_is_a_miss_and_is_read_again(index):
    pool, model = open_staged(index, open_tier(index))
    run(pool, model)
    pool.close()
    tier = open_tier(index)
    with tier.path.open("r+b") as stream:
        for slot in range(16):
            stream.seek(slot * index.layers[0].slot_bytes + 100)
            stream.write(b"\xff\x00\xff")
    reader = FaultyReader(index)
    pool, model = open_staged(index, tier, reader)
    run(pool, model)
    assert reader.reads
    pool.close()


def test_a_table_of_garbage_harms_nobody(index):
    tier = open_tier(index)
    tier.keep(0, 3, image(index, 3), None)
    rng = np.random.default_rng(0)
    for name in ("slot", "image", "used"):
        tier._records[name] = rng.integers(-(2**40), 2**40, 16)
    tier._owners[:] = [*rng.integers(-5, 16, 12), 16, 2**40, -(2**62), 2**62]
    for expert in range(8):
        assert fetched(tier, index, 0, expert) is None
        assert tier.keep(0, expert, image(index, expert), None)
        assert np.array_equal(fetched(tier, index, 0, expert), image(index, expert))
    tier.close()


def test_readers_outlive_whatever_the_tier_raises(index, monkeypatch, caplog):
    """An exception in a reader thread would leave its loads, and the step, waiting for ever."""
    tier = open_tier(index)

    def fail(*_):
        raise IndexError("out of bounds")

    monkeypatch.setattr(tier, "keep", fail)
    pool, model = open_staged(index, tier, read_threads=2)
    with caplog.at_level(logging.WARNING):
        run(pool, model)
    assert "cannot keep an expert: out of bounds" in caplog.text
    assert all(thread.is_alive() for thread in pool._store._threads)
    pool.close()


def _die_while_writing(folder: Path, at: int) -> None:
    index = FakeIndex(folder / "again", SHAPE)
    index.model_dir = folder / "model"
    tier = HostTier(index, "float32", 4 * index.layers[0].slot_bytes, folder / "shm")
    calls = 0
    right = os.pwrite

    def die(descriptor, data, offset):
        nonlocal calls
        calls += 1
        if calls == at:
            right(descriptor, memoryview(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return right(descriptor, data, offset)

    host_tier.os.pwrite = die
    for expert in range(8):
        tier.keep(0, expert, image(index, 100 + expert), None)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("at", [3, 6])
def test_a_writer_that_dies_leaves_no_half_record_that_is_believed(index, at):
    folder = index.model_dir.parent
    tier = open_tier(index, slots=4)
    child = multiprocessing.get_context("spawn").Process(
        target=_die_while_writing, args=(folder, at)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    whole = 0
    for expert in range(8):
        found = fetched(tier, index, 0, expert)
        if found is not None:
            assert np.array_equal(found, image(index, 100 + expert))
            whole += 1
    assert whole == min(at - 1, 4 - (at > 4))
    # Its lock is gone with it, and every slot can be used.
    for expert in range(4):
        assert tier.keep(1, expert, image(index, expert), None)
    assert tier.num_kept == 4
    tier.close()


CHURN = """
import sys, time
from pathlib import Path
import numpy as np
from expert_pool.host_tier import HostTier
from tests.expert_pool.fake_experts import FakeIndex
from tests.expert_pool.test_host_tier import SHAPE, image
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
index = FakeIndex(folder / f"copy{seed}", SHAPE)
tier = HostTier(index, "float32", 5 * index.layers[0].slot_bytes, folder / "shm")
rng = np.random.default_rng(seed)
right = {expert: image(index, expert) for expert in range(8)}
into = np.zeros(index.layers[0].slot_bytes, dtype=np.uint8)
hits = kept = 0
end = time.monotonic() + 2
while time.monotonic() < end:
    expert = int(rng.integers(8))
    if tier.fetch(0, expert, into, None):
        hits += 1
        assert np.array_equal(into, right[expert])
    else:
        kept += tier.keep(0, expert, right[expert], None)
print(hits, kept)
"""


def test_two_processes_that_read_and_write_at_once_see_whole_experts_only(index):
    folder = index.model_dir.parent
    root = Path(__file__).parents[2]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHURN, str(folder), str(seed)],
            stdout=subprocess.PIPE,
            cwd=root,
        )
        for seed in (1, 2)
    ]
    for child in children:
        out, _ = child.communicate(timeout=100)
        assert child.returncode == 0
        hits, kept = map(int, out.split())
        assert hits > 50 and kept > 50


def test_a_writer_that_hangs_holds_nobody_up(index):
    tier = open_tier(index)
    other = os.open(tier.path.with_suffix(".turn"), os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    began = time.monotonic()
    assert not tier.keep(0, 1, image(index, 1), None)
    assert time.monotonic() - began < 1
    os.close(other)
    assert tier.keep(0, 1, image(index, 1), None)
    tier.close()


def test_a_folder_that_others_can_write_to_is_not_used(index):
    folder = index.model_dir.parent / "shm"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="ours alone"):
        open_tier(index)


def test_a_tier_that_cannot_be_made_leaves_no_files_behind(index, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host_tier.os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            open_tier(index)
    assert len(os.listdir("/proc/self/fd")) == before
    assert [path.name for path in (index.model_dir.parent / "shm").iterdir()] == ["lock"]
    monkeypatch.undo()
    open_tier(index).close()


def test_full_memory_is_a_warning_and_the_expert_is_served(index, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    pool, model = open_staged(index, open_tier(index))
    monkeypatch.setattr(host_tier.os, "pwrite", full)
    run(pool, model)
    pool.close()
    assert "No space left" in caplog.text


def test_m16_two_models_are_never_mixed_and_an_unused_one_makes_way(index, tmp_path, monkeypatch):
    """MoE-Infinity README: two models in one cache folder."""
    other = FakeIndex(tmp_path / "other", SHAPE, seed=1)
    first = open_tier(index)
    first.keep(0, 3, image(index, 3), None)
    second = open_tier(other)
    assert fetched(second, other, 0, 3) is None
    first.close()
    second.close()
    # Too little memory: who is in use stays, who is not goes.
    used = open_tier(index)
    third = FakeIndex(tmp_path / "third", SHAPE, seed=2)
    monkeypatch.setattr(
        host_tier.os, "statvfs", lambda path: os.statvfs_result((1,) * 4 + (0,) * 6)
    )
    newest = open_tier(third)
    assert used.path.exists() and not second.path.exists()
    assert fetched(used, index, 0, 3) is not None
    for tier in (used, newest):
        tier.close()


def test_another_size_is_made_when_nobody_uses_the_old_one(index, caplog):
    old = open_tier(index, slots=4)
    old.keep(0, 1, image(index, 1), None)
    with caplog.at_level(logging.WARNING):
        same = open_tier(index, slots=6)
    assert same.num_slots == 4 and "in use" in caplog.text
    assert fetched(same, index, 0, 1) is not None
    old.close()
    same.close()
    new = open_tier(index, slots=6)
    assert new.num_slots == 6
    assert fetched(new, index, 0, 1) is None
    new.close()


def test_m17_without_pinned_memory_it_says_so_and_copies_from_pageable(index, monkeypatch, caplog):
    """mixtral-offloading#18: pinned allocation fails."""
    right = torch.empty

    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return right(*args, **kwargs)

    monkeypatch.setattr(store.torch, "empty", refuse)
    pool, model = open_staged(index, open_tier(index), read_threads=1)
    with caplog.at_level(logging.WARNING):
        run(pool, model)
    pool.close()
    said = [r.message for r in caplog.records if "pageable" in r.message]
    assert len(said) == 1 and "out of memory" in said[0]


# The page cache.


def test_the_page_cache_holds_what_the_budget_allows_and_no_more(index, monkeypatch):
    dropped = []
    advise = os.posix_fadvise

    def note(descriptor, offset, nbytes, advice):
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((offset, nbytes))
        advise(descriptor, offset, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    reader = PageCacheReader(index.files, 3 * index.record_bytes)
    into = {p: np.empty(p.nbytes, np.uint8) for e in range(8) for p in index.record(0, e).pieces}
    for piece, array in into.items():
        reader.read(piece.file, piece.offset, array)
        assert array.tobytes() == index.piece_bytes(piece)
        assert reader.kept_bytes <= 3 * index.record_bytes
    expected = [(p.offset, p.nbytes) for e in range(5) for p in index.record(0, e).pieces]
    assert dropped == expected
    last = index.record(0, 7).pieces[0]
    assert reader.read(last.file, last.offset, into[last]) is True
    reader.close()


def test_a_pool_on_a_cpu_counts_what_the_page_cache_served(index):
    """What was just written lies in the page cache; where the kernel cannot tell, it is a read."""
    settings = PoolSettings(expert_memory=slots_bytes(index, 2), host_memory="all")
    reader = open_reader(index, settings, torch.device("cpu"))
    assert isinstance(reader, PageCacheReader)
    pool = ExpertPool(index, settings, reader=reader)
    model = FakeModel(index)
    pool.attach(model)
    for stats in run(pool, model):
        assert stats.host_records + stats.records_read == stats.demand_misses
    assert open_host_tier(index, settings, torch.device("cpu")) is None
    pool.close()


def test_a_bad_checksum_is_read_again_from_the_disk_not_from_the_cache(index, monkeypatch):
    settings = PoolSettings(expert_memory=slots_bytes(index, 2), host_memory="all")
    pool = ExpertPool(index, settings)
    pool.preload([(0, 3)])
    pool.settle()
    pool.evict([(0, 3)])
    reader = pool._store._reader
    forgotten = []
    right = PageCacheReader.read

    def garble_once(self, file, offset, into):
        found = right(self, file, offset, into)
        if not forgotten:
            into[0] ^= 1
        return found

    monkeypatch.setattr(PageCacheReader, "read", garble_once)
    monkeypatch.setattr(reader, "forget", lambda pieces: forgotten.extend(pieces))
    pool.preload([(0, 3)])
    pool.settle()
    assert len(forgotten) == len(index.record(0, 3).pieces)
    assert pool.residency.states.state[0, 3] == 2
    pool.close()


def test_full_memory_is_said_once_and_the_tier_rests(index, monkeypatch, caplog):
    tier, now, asked = open_tier(index), [100.0], []

    def full(*args):
        asked.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier, "keep", full)
    monkeypatch.setattr("expert_pool.store.time.monotonic", lambda: now[0])
    pool, model = open_staged(index, tier, read_threads=1)
    run(pool, model)
    assert len(asked) == 1
    now[0] += KEEP_REST_S
    run(pool, model)
    pool.close()
    assert len(asked) == 2
    assert caplog.text.count("cannot keep an expert") == 1
