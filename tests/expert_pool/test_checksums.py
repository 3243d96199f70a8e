"""The book of checksums: kept beside the model or in the cache, never garbled, never mixed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.checksums import ChecksumBook
from tests.expert_pool.stored_experts import edited_copy
from tests.models.families import cached_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(cached_checkpoint("qwen3_moe"), tmp_path / "model")


def without_room_beside(folder: Path) -> Path:
    """Makes `.coterie` impossible in `folder`, as a read-only place does (root writes anywhere)."""
    (folder / ".coterie").write_text("in the way")
    return folder


def test_what_was_learned_is_known_next_time(folder: Path) -> None:
    index = CheckpointIndex.open(folder)
    book = ChecksumBook(index)
    assert book.get(1, 3) is None
    book.learn(1, 3, 2**64 - 1)
    book.learn(0, 0, 0)
    book.learn_tensor("lm_head.weight", 7)
    path = book.save()
    assert path is not None
    assert path.parent == folder / ".coterie"
    again = ChecksumBook(index)
    assert (again.get(1, 3), again.get(0, 0), again.get(0, 1)) == (2**64 - 1, 0, None)
    assert again.get_tensor("lm_head.weight") == 7
    assert again.num_known == 2


def test_the_first_checksum_stays(folder: Path) -> None:
    book = ChecksumBook(CheckpointIndex.open(folder))
    book.learn(0, 0, 1)
    book.learn(0, 0, 2)
    assert book.get(0, 0) == 1


def test_two_processes_keep_each_other_s(folder: Path) -> None:
    index = CheckpointIndex.open(folder)
    one, other = ChecksumBook(index), ChecksumBook(index)
    one.learn(0, 0, 1)
    other.learn(0, 1, 2)
    one.save()
    other.save()
    book = ChecksumBook(index)
    assert (book.get(0, 0), book.get(0, 1)) == (1, 2)


def test_read_only_model_keeps_its_book_in_the_cache(folder: Path, cache: Path) -> None:
    index = CheckpointIndex.open(without_room_beside(folder))
    book = ChecksumBook(index)
    book.learn(0, 0, 1)
    path = book.save()
    assert path is not None
    assert path.is_relative_to(cache)
    assert ChecksumBook(index).get(0, 0) == 1


def test_two_models_in_one_cache_are_never_mixed(tmp_path: Path, cache: Path) -> None:
    """Same architecture, names, sizes and headers; the weights differ in experts alone."""
    source = cached_checkpoint("qwen3_moe")

    def scale(tensors: dict) -> None:
        for name in tensors:
            if ".experts." in name:
                tensors[name] *= 2

    one = without_room_beside(edited_copy(source, tmp_path / "one", lambda _: None))
    two = without_room_beside(edited_copy(source, tmp_path / "two", scale))
    first, second = CheckpointIndex.open(one), CheckpointIndex.open(two)
    assert first.content_key != second.content_key
    book = ChecksumBook(first)
    book.learn(0, 0, 1)
    book.save()
    assert ChecksumBook(second).get(0, 0) is None


def test_weights_replaced_in_place_get_a_book_of_their_own(folder: Path, tmp_path: Path) -> None:
    book = ChecksumBook(CheckpointIndex.open(folder))
    book.learn(0, 0, 1)
    book.save()
    shutil.copy(cached_checkpoint("qwen3_moe", seed=1) / "model.safetensors", folder)
    replaced = ChecksumBook(CheckpointIndex.open(folder))
    assert replaced.get(0, 0) is None
    assert len(replaced.earlier_books()) == 1


def test_damage_to_an_expert_leaves_its_checksum_known(folder: Path) -> None:
    index = CheckpointIndex.open(folder)
    book = ChecksumBook(index)
    book.learn(1, 3, 5)
    book.save()
    piece = index.record(1, 3).pieces[0]
    with index.files[piece.file].open("r+b") as stream:
        stream.seek(piece.offset)
        byte = stream.read(1)
        stream.seek(piece.offset)
        stream.write(bytes([byte[0] ^ 1]))
    assert ChecksumBook(CheckpointIndex.open(folder)).get(1, 3) == 5


def test_full_disk_is_a_warning_and_the_old_book_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = CheckpointIndex.open(folder)
    book = ChecksumBook(index)
    book.learn(0, 0, 1)
    old = book.save()
    assert old is not None

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    book.learn(0, 1, 2)
    with caplog.at_level(logging.WARNING):
        assert book.save() is None
    assert "No space left on device" in caplog.text
    assert ChecksumBook(index).get(0, 0) == 1
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_a_damaged_book_is_left_aside(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = CheckpointIndex.open(folder)
    book = ChecksumBook(index)
    book.learn(0, 0, 1)
    path = book.save()
    assert path is not None
    raw = path.read_bytes()

    @settings(max_examples=200, deadline=None, database=None)
    @given(place=st.integers(0, len(raw) - 1), flip=st.integers(0, 255))
    def damaged(place: int, flip: int) -> None:
        """A byte changed, or (flip 0) everything after it cut off."""
        broken = raw[:place] + (bytes([raw[place] ^ flip]) + raw[place + 1 :] if flip else b"")
        path.write_bytes(broken)
        assert ChecksumBook(index).num_known == 0

    damaged()
    assert "learned again" in caplog.text
    path.write_bytes(raw)
    assert ChecksumBook(index).num_known == 1
