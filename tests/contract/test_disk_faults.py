"""Disks that fail under a running engine: a clear error for whom it concerns, no garbled token."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.request import Request, SamplingParams
from engine.engine import Engine
from expert_pool.checksums import ChecksumBook
from expert_pool.file_reader import ByteArray, FileReader

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
NEW_TOKENS = 12
PROMPTS = {"a": tuple(range(40, 70)), "b": tuple(range(300, 340)), "c": tuple(range(900, 960))}

Answers = dict[str, tuple[list[int], str | None]]
"""By request: tokens, and the name of the error that ended it, if one did."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns(".coterie")
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model", ignore=ignored))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))


def open_engine(folder: Path, expert_memory: str = "40%") -> Engine:
    return Engine.open(
        folder,
        engine={"threads": 1, "max_sequences": 4, "kv_memory": "16MiB"},
        pool={"expert_memory": expert_memory, "hot_start_s": 0},
    )


def answers(engine: Engine, round_: int = 0) -> Answers:
    """Greedy answers to all prompts at once; checks that the engine is idle and sound after."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for name, prompt in PROMPTS.items():
        request_id = f"{name}{round_}"
        # A tenant of its own: with cached beginnings the same tokens pass in other batches.
        request = Request(
            request_id=request_id, prompt_ids=prompt, params=params, tenant=request_id
        )
        engine.add(request)
    found: Answers = {name: ([], None) for name in PROMPTS}
    while engine.has_work():
        for output in engine.step().outputs:
            tokens, _ = found[output.request_id[0]]
            tokens += output.token_ids
            if output.finish_reason == "error":
                found[output.request_id[0]] = tokens, output.error_type
    engine.check_invariants()
    return found


def forget_all(engine: Engine) -> None:
    """No expert is resident any more: the next answer reads what the disk now holds."""
    engine.pool.begin_step()
    engine.pool.evict([(layer, expert) for layer in range(6) for expert in range(32)])
    engine.pool.end_step()


@pytest.fixture(scope="module")
def right() -> Iterator[Answers]:
    """What a sound disk gives."""
    engine = Engine.open(
        DEMO_MODEL,
        engine={"threads": 1, "max_sequences": 4, "kv_memory": "16MiB"},
        pool={"verify_checksums": False, "hot_start_s": 0},
    )
    yield answers(engine)
    engine.close()


def assert_nothing_is_garbled(found: Answers, right: Answers) -> None:
    for name, (tokens, error) in found.items():
        assert tokens == right[name][0][: len(tokens)], name
        assert error == "ExpertReadError" or len(tokens) == NEW_TOKENS, (name, error)


def test_a_flipped_byte_fails_whom_it_concerns_and_garbles_nobody(
    folder: Path, right: Answers
) -> None:
    engine = open_engine(folder)
    assert answers(engine) == right
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    # One byte in each MiB: some expert of each layer is hit.
    for at in range(1 << 20, len(data), 1 << 20):
        data[at] ^= 0x40
    with path.open("r+b") as file:
        file.write(data)
    forget_all(engine)
    found = answers(engine, 1)
    engine.close()
    assert_nothing_is_garbled(found, right)
    assert any(error for _, error in found.values()), "the flipped bytes were never read"


def test_a_file_cut_short_fails_whom_it_concerns_and_garbles_nobody(
    folder: Path, right: Answers
) -> None:
    engine = open_engine(folder)
    assert answers(engine) == right
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    forget_all(engine)
    found = answers(engine, 1)
    engine.close()
    assert_nothing_is_garbled(found, right)
    assert any(error for _, error in found.values())


@pytest.mark.parametrize("how", ["removed", "replaced by another"])
def test_a_file_removed_under_a_running_engine_is_read_on(
    folder: Path, right: Answers, how: str
) -> None:
    engine = open_engine(folder)
    assert answers(engine) == right
    path = folder / "model.safetensors"
    size = path.stat().st_size
    path.unlink()
    if how == "replaced by another":
        path.write_bytes(b"\x07" * size)
    forget_all(engine)
    assert answers(engine, 1) == right
    engine.close()


def test_a_slow_disk_changes_no_token(
    folder: Path, right: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileReader.read

    def slow(self: FileReader, file: int, offset: int, into: ByteArray) -> bool:
        time.sleep(0.002)
        return read(self, file, offset, into)

    monkeypatch.setattr(FileReader, "read", slow)
    engine = open_engine(folder)
    assert answers(engine) == right
    engine.close()


def test_a_disk_full_of_other_things_costs_the_checksums_and_nothing_else(
    folder: Path, right: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        engine = open_engine(folder)
        assert answers(engine) == right
        engine.close()
    assert "No space left on device" in caplog.text
    left = [path for path in folder.parent.rglob("*checksums*") if path.is_file()]
    assert not left, "neither a whole book nor half of one"
    engine = open_engine(folder)
    assert answers(engine) == right
    assert ChecksumBook(engine.pool.index).num_known == 0
    engine.close()
