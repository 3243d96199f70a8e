"""A reader sees the old file or the new one, never a part."""

from __future__ import annotations

import os

import pytest

from core.whole_file import write_whole


def test_it_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "made" / "file.bin"
    for content in (b"one", b"two"):
        write_whole(path, lambda stream, content=content: stream.write(content), mode=0o644)
        assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == ["file.bin"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_halfway_leaves_the_old_one(tmp_path, error):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")

    def half(stream):
        stream.write(b"ne")
        raise error

    with pytest.raises(type(error)):
        write_whole(path, half)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin"]


def test_a_reader_that_has_it_open_goes_on_with_the_old_one(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        write_whole(path, lambda stream: stream.write(b"new"), durable=False)
        assert reader.read() == b"old"
    assert os.listdir(tmp_path) == ["file.bin"]
