"""Public bug reports about checkpoints, as tests: each refusal names the tensor or the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import CheckpointError
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.checksums import ChecksumBook
from tests.models.families import cached_checkpoint


def copy_of(family: str, tmp_path: Path, shards: int = 1) -> Path:
    return shutil.copytree(cached_checkpoint(family, "float32", 0, shards), tmp_path / family)


def test_serving_61_missing_shard_is_named(tmp_path: Path) -> None:
    """CoSER#3: one shard of a sharded checkpoint was missing."""
    folder = copy_of("qwen3_moe", tmp_path, shards=4)
    shards = sorted(folder.glob("model-*.safetensors"))
    for shard in (shards[0], shards[2]):
        shard.unlink()
    with pytest.raises(CheckpointError) as refused:
        CheckpointIndex.open(folder)
    assert shards[0].name in str(refused.value)
    assert shards[2].name in str(refused.value)
    assert shards[1].name not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.1.mlp.gate.weight", "model.embed_tokens.weight"],
)
def test_serving_63_missing_weight_is_named_and_never_random(name: str, tmp_path: Path) -> None:
    """transformers#34759: a weight was missing in the file and got random values."""
    folder = copy_of("qwen3_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        CheckpointIndex.open(folder)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3_moe", "model.layers.7.mlp.gate.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.16.up_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w4.weight"),
        ("granitemoe", "model.layers.1.block_sparse_moe.shared.weight"),
        ("gpt_oss", "model.layers.1.mlp.experts.extra_bias"),
    ],
)
def test_moe_m14_tensor_that_nobody_reads_is_named(family: str, name: str, tmp_path: Path) -> None:
    """vLLM#45830: extra tensors were dropped in silence."""
    folder = copy_of(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.zeros(32, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        CheckpointIndex.open(folder)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_moe", [f"model.layers.2.mlp.experts.6.{p}_proj.weight" for p in ("up", "down")]),
        ("mixtral", ["model.layers.1.block_sparse_moe.experts.3.w2.weight"]),
        ("jamba", ["model.layers.1.feed_forward.experts.7.gate_proj.weight"]),
        ("nemotron_h", ["model.layers.1.mixer.experts.0.up_proj.weight"]),
    ],
)
def test_moe_m14_missing_expert_is_named(family: str, names: list[str], tmp_path: Path) -> None:
    """1CatAI#21: an expert was missing."""
    folder = copy_of(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        key = name if name in tensors else name.replace("model.", "backbone.", 1)
        del tensors[key]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refused:
        CheckpointIndex.open(folder)
    for name in names:
        assert name.removeprefix("model.") in str(refused.value)


def test_moe_m16_two_models_in_one_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MoE-Infinity README: what was kept of one model was taken for another's."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    indexes = []
    for seed in (0, 1):
        source = cached_checkpoint("qwen3_moe", "float32", seed)
        folder = shutil.copytree(source, tmp_path / f"seed-{seed}")
        (folder / ".coterie").write_text("not a folder: nothing can be kept beside this model")
        indexes.append(CheckpointIndex.open(folder))
    one, two = indexes
    assert one.content_key != two.content_key
    for number, index in enumerate(indexes):
        book = ChecksumBook(index)
        assert book.num_known == 0
        book.learn(0, 0, 100 + number)
        assert book.save() is not None
    assert [ChecksumBook(index).get(0, 0) for index in indexes] == [100, 101]
    copied = shutil.copytree(one.model_dir, tmp_path / "copy")
    assert CheckpointIndex.open(copied).content_key == one.content_key
