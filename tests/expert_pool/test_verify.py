"""`coterie verify`: learns at first, compares afterwards, and says what differs and where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from app.cli import main
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.checksums import ChecksumBook
from expert_pool.verify import total_bytes, verify_all
from tests.models.families import cached_checkpoint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(cached_checkpoint("qwen3_moe", "bfloat16", 0, 3), tmp_path / "model")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 16]))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    return int(ended.value.code or 0)


def test_reads_every_byte_once_and_learns(folder: Path) -> None:
    index = CheckpointIndex.open(folder)
    steps: list[int] = []
    report = verify_all(index, steps.append)
    data = sum(path.stat().st_size for path in index.files)
    assert 0.9 * data < report.bytes_read <= data
    assert report.bytes_read == sum(steps) == total_bytes(index)
    assert report.experts == 32
    assert report.learned == report.experts + report.tensors
    assert report.tensors == len(index.backbone)
    assert ChecksumBook(index).num_known == 32
    again = verify_all(index)
    assert (again.learned, again.mismatched) == (0, [])


def test_one_flipped_bit_of_an_expert_is_found_and_named(folder: Path) -> None:
    index = CheckpointIndex.open(folder)
    verify_all(index)
    piece = index.record(1, 5).pieces[2]
    flip(index.files[piece.file], piece.offset + piece.nbytes - 1)
    report = verify_all(CheckpointIndex.open(folder))
    assert report.mismatched == [
        f"expert 5 of model.layers.2.mlp.experts in {index.files[piece.file].name}"
    ]


def test_one_flipped_bit_of_the_backbone_is_found_and_named(folder: Path) -> None:
    index = CheckpointIndex.open(folder)
    verify_all(index)
    entry = index.backbone["model.embed_tokens.weight"]
    flip(index.files[entry.file], entry.offset + entry.nbytes - 1)
    report = verify_all(CheckpointIndex.open(folder))
    assert report.mismatched == [
        f"tensor model.embed_tokens.weight in {index.files[entry.file].name}"
    ]


def test_command_exits_with_what_it_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(folder)) == 0
    assert "32 experts" in capsys.readouterr().out
    index = CheckpointIndex.open(folder)
    piece = index.record(0, 0).pieces[0]
    flip(index.files[piece.file], piece.offset)
    assert run(str(folder), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["mismatched"]) == 1
    assert "expert 0 of model.layers.1" in report["mismatched"][0]


def test_command_names_what_is_wrong_before_reading(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert run(str(folder)) == 1
    assert shard.name in capsys.readouterr().err
