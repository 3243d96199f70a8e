"""The index against stock transformers: every expert of every family, and every refusal."""

from __future__ import annotations

import gc
import json
import shutil
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import CheckpointError
from expert_pool import model_probe, transformers_private
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.families import SUPPORTED
from expert_pool.safetensors_header import read_header
from tests.expert_pool.stored_experts import (
    Tensors,
    assembled,
    edit_config,
    edited_copy,
    placed,
)
from tests.models.families import FAMILIES, cached_checkpoint, make_config

STORED = [("float32", 1), ("bfloat16", 3)]


def stock(folder: Path, dtype: str = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def assert_experts_equal(index: CheckpointIndex, model: Any, prefix: str = "model.") -> None:
    for layer in index.layers:
        module = model.get_submodule(layer.module_name.replace("model.", prefix, 1))
        for expert in range(layer.num_experts):
            slots = [assembled(index, layer.ordinal, expert)]
            if index.placement(layer.ordinal) is not None:
                slots.append(placed(index, layer.ordinal, expert))
            for params in slots:
                for name, value in params.items():
                    expected = getattr(module, name)[expert]
                    assert value.dtype == expected.dtype
                    assert torch.equal(value, expected), (layer.module_name, name, expert)


def test_table_of_families_is_the_list_of_supported_ones() -> None:
    assert set(FAMILIES) == set(SUPPORTED)


@pytest.mark.parametrize(("dtype", "shards"), STORED)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_equals_stock_bitwise(family: str, dtype: str, shards: int) -> None:
    folder = cached_checkpoint(family, dtype, 0, shards)
    index = CheckpointIndex.open(folder)
    model = stock(folder)
    assert len(index.files) >= shards
    assert index.dtype == model.dtype
    assert index.shape.model_type == model.config.model_type
    assert index.shape.total_params == model.num_parameters()
    assert all(index.placement(layer.ordinal) is not None for layer in index.layers)
    assert_experts_equal(index, model)


@pytest.mark.parametrize(("stored", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe", "nemotron_h"])
def test_cast_experts_equal_stock_bitwise(family: str, stored: str, dtype: str) -> None:
    folder = cached_checkpoint(family, stored, 0, 1 if stored == "float32" else 3)
    index = CheckpointIndex.open(folder, dtype)
    assert all(index.placement(layer.ordinal) is None for layer in index.layers)
    assert_experts_equal(index, stock(folder, dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_is_what_a_real_run_shows(family: str) -> None:
    folder = cached_checkpoint(family)
    index = CheckpointIndex.open(folder)
    model = stock(folder)
    config = model.config
    names = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    (top_k,) = {
        getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)
    }
    assert {layer.top_k for layer in index.layers} == {top_k}
    cache = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True).cache
    stored = {
        number: (layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1])
        for number, layer in enumerate(cache.layers)
        if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4
    }
    found = {
        layer.decoder_layer: (layer.kv_heads, layer.key_dim, layer.value_dim)
        for layer in index.shape.kv_layers
        if layer.shares_layer is None
    }
    assert found == stored
    assert index.shape.num_layers == config.num_hidden_layers


def test_shared_and_windowed_layers_are_told_apart() -> None:
    layers = CheckpointIndex.open(cached_checkpoint("gemma4_text")).shape.kv_layers
    assert [layer.shares_layer for layer in layers] == [None, None, 0, 1]
    assert [layer.window_tokens for layer in layers] == [8, None, 8, None]
    assert [layer.values_per_token for layer in layers] == [64, 64, 0, 0]


def test_llama4_shim_computes_what_stock_computes() -> None:
    folder = cached_checkpoint("llama4_text")
    model = stock(folder)
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        transformers_private.llama4.install(model)
        model.config._experts_implementation = "grouped_mm"
        found = model(input_ids=ids).logits
    assert any(type(m).__name__ == "Llama4PooledMoe" for m in model.modules())
    assert (found - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())


def composite(family: str) -> Any:
    """A multimodal model, as hub checkpoints of these families come."""
    text = {**make_config(f"{family}_text").to_dict(), "model_type": f"{family}_text"}
    vision: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    if family == "llama4":
        vision |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}
        vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
    other = {"audio_config": None} if family == "gemma4" else {}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **other)
    classes = {
        "llama4": "Llama4ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
        "gemma4": "Gemma4ForConditionalGeneration",
    }
    model = getattr(transformers, classes[family])(config)
    model.config.dtype = torch.float32
    return model


@pytest.mark.parametrize("family", ["llama4", "qwen3_5_moe", "gemma4"])
def test_text_model_of_a_multimodal_checkpoint(family: str, tmp_path: Path) -> None:
    composite(family).save_pretrained(tmp_path)
    index = CheckpointIndex.open(tmp_path)
    model = stock(tmp_path)
    assert index.config.model_type == f"{family}_text"
    inside = "model.language_model." if family == "gemma4" else "model."
    assert_experts_equal(index, model, inside)
    assert not any("vis" in name for name in index.backbone)

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.audio_tower.strange.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"read by nobody.*audio_tower\.strange\.weight"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("family", ["llama4", "qwen3_5_moe", "gemma4"])
def test_backbone_of_a_multimodal_checkpoint_loads(family: str, tmp_path: Path) -> None:
    composite(family).save_pretrained(tmp_path)
    index = CheckpointIndex.open(tmp_path)
    expected = dict(stock(tmp_path).named_parameters())
    model_probe.register_recorder()
    model = transformers_private.build_meta_model(
        index.config, index.dtype, model_probe.RECORDER_NAME
    )
    for layer in index.layers:
        module = model.get_submodule(layer.module_name)
        for param in layer.params:
            delattr(module, param.name)
        module._is_hf_initialized = True
    tensors = load_file(tmp_path / "model.safetensors")
    transformers_private.load_weights(
        model, {name: tensors[name] for name in index.backbone}, index.dtype
    )
    inside = "model.language_model." if family == "gemma4" else "model."
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name.replace("model.", inside, 1)]), name


def test_stacked_experts_in_the_model_s_own_names(tmp_path: Path) -> None:
    """Checkpoints of qwen3_moe also come with one stacked tensor a parameter."""
    source = cached_checkpoint("qwen3_moe")
    model = stock(source)
    shutil.copytree(source, tmp_path / "m")
    tensors = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    index = CheckpointIndex.open(tmp_path / "m")
    assert len(index.record(0, 3).pieces) == 2
    assert_experts_equal(index, model)


def test_next_token_prediction_layers_are_left_out_as_stock_does(tmp_path: Path) -> None:
    source = cached_checkpoint("qwen3_next")
    extra = {"mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(2, 2)}
    index = CheckpointIndex.open(edited_copy(source, tmp_path / "m", lambda t: t.update(extra)))
    assert not extra.keys() & index.backbone.keys()


def test_tied_embeddings_need_no_second_tensor() -> None:
    index = CheckpointIndex.open(cached_checkpoint("qwen3_moe"))
    assert "lm_head.weight" not in index.backbone
    assert "model.embed_tokens.weight" in index.backbone


def without(*parts: str) -> Any:
    def edit(tensors: Tensors) -> None:
        for key in [key for key in tensors if all(part in key for part in parts)]:
            del tensors[key]

    return edit


def transposed(key: str) -> Any:
    def edit(tensors: Tensors) -> None:
        tensors[key] = tensors[key].T.contiguous()

    return edit


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
REFUSED = {
    "one tensor of one expert": (without(EXPERT), EXPERT),
    "the last expert": (without("layers.1.mlp.experts.15."), "experts.15."),
    "one projection of a whole layer": (without("layers.2.mlp.experts.", "up_proj"), "up_proj"),
    "all experts of a layer": (without("layers.2.mlp.experts."), "model.layers.2.mlp.experts"),
    "a backbone tensor": (without("layers.0.self_attn.q_norm"), "layers.0.self_attn.q_norm.weight"),
    "a transposed expert": (transposed(EXPERT), EXPERT),
    "a transposed backbone tensor": (
        transposed("model.layers.1.mlp.gate.weight"),
        "model.layers.1.mlp.gate.weight",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_missing_and_misshapen_tensors_are_named(what: str, tmp_path: Path) -> None:
    edit, name = REFUSED[what]
    folder = edited_copy(cached_checkpoint("qwen3_moe"), tmp_path / "m", edit)
    with pytest.raises(CheckpointError) as refused:
        CheckpointIndex.open(folder)
    assert name in str(refused.value)


def test_experts_of_unlike_encodings_are_refused(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[EXPERT] = tensors[EXPERT].bfloat16()

    folder = edited_copy(cached_checkpoint("qwen3_moe"), tmp_path / "m", edit)
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj.*bfloat16.*alike"):
        CheckpointIndex.open(folder)


def test_experts_in_eight_bits_are_refused_even_unannounced(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    folder = edited_copy(cached_checkpoint("qwen3_moe"), tmp_path / "m", edit)
    with pytest.raises(CheckpointError, match="in float8_e4m3fn"):
        CheckpointIndex.open(folder)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(cached_checkpoint("qwen3_moe"), tmp_path / "m")
    path = folder / "model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="cut short"):
        CheckpointIndex.open(folder)


@settings(max_examples=200, deadline=None)
@given(head=st.binary(max_size=64), length=st.integers(0, 2**64 - 1) | st.integers(0, 64))
def test_no_header_does_worse_than_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, head: bytes, length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(struct.pack("<Q", length) + head)
    try:
        read_header(path, 0)
    except CheckpointError as error:
        assert str(path) in str(error)


def test_pickles_remote_code_and_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    source = cached_checkpoint("qwen3_moe")
    pickled = shutil.copytree(source, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model\.bin\)"):
        CheckpointIndex.open(pickled)

    remote = shutil.copytree(source, tmp_path / "remote")
    edit_config(remote, model_type="strange", auto_map={"AutoConfig": "strange.StrangeConfig"})
    (remote / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="running code"):
        CheckpointIndex.open(remote)
    assert not (tmp_path / "ran").exists()

    quantised = shutil.copytree(source, tmp_path / "quantised")
    edit_config(quantised, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"quantised \(mxfp4\)"):
        CheckpointIndex.open(quantised)


def test_remote_code_beside_a_family_we_know_is_never_run(tmp_path: Path) -> None:
    folder = shutil.copytree(cached_checkpoint("qwen3_moe"), tmp_path / "m")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (folder / "evil.py").write_text(code)
    edit_config(
        folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    CheckpointIndex.open(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("llama", {"intermediate_size": 64, "num_key_value_heads": 2}),
        ("dbrx", {"d_model": 32, "attn_config": {"rope_theta": 1e4}}),
        ("jetmoe", {"intermediate_size": 32, "num_local_experts": 4, "num_key_value_heads": 2}),
        ("switch_transformers", {"d_model": 32}),
    ],
)
def test_models_without_experts_to_pool_are_refused_with_the_list(
    model_type: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    common = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoConfig.for_model(
        model_type, vocab_size=32, **({} if "d_model" in sizes else common), **sizes
    ).save_pretrained(tmp_path)
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=model_type) as refused:
        CheckpointIndex.open(tmp_path)
    assert "qwen3_moe" in str(refused.value)


def test_a_folder_that_is_no_model_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Expected a model folder at"):
        CheckpointIndex.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        CheckpointIndex.open(tmp_path)
    shutil.copy(cached_checkpoint("qwen3_moe") / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        CheckpointIndex.open(tmp_path)


def write_sparse_checkpoint(folder: Path, layers: int, experts: int, files: int) -> int:
    """A deepseek_v3 checkpoint of many tiny experts whose bytes are holes; returns its tensors."""
    config = make_config("deepseek_v3")
    config.num_hidden_layers, config.n_routed_experts = layers, experts
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, list[int]] = {}
    for name, tensor in model.state_dict().items():
        base, _, leaf = name.rpartition(".")
        if not base.endswith(".experts"):
            shapes[name] = list(tensor.shape)
            continue
        rows, columns = tensor.shape[1:]
        parts = (
            {"down_proj": rows}
            if leaf == "down_proj"
            else {"gate_proj": rows // 2, "up_proj": rows // 2}
        )
        for part, size in parts.items():
            for expert in range(experts):
                shapes[f"{base}.{expert}.{part}.weight"] = [size, columns]
    names, weight_map = sorted(shapes), {}
    for number in range(files):
        file = f"model-{number:05d}.safetensors"
        table, end = {}, 0
        for name in names[number::files]:
            start, end = end, end + 2 * shapes[name][0] * (shapes[name] + [1])[1]
            table[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
            weight_map[name] = file
        header = json.dumps(table).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            stream.truncate(8 + len(header) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return len(names)


def test_thousands_of_experts_are_indexed_in_seconds(tmp_path: Path) -> None:
    tensors = write_sparse_checkpoint(tmp_path, layers=13, experts=256, files=12)
    assert tensors > 10 * 256 * 3
    started = time.process_time()
    index = CheckpointIndex.open(tmp_path)
    assert time.process_time() - started < 10.0
    assert index.record(9, 255).nbytes == index.record(0, 0).nbytes


def test_an_expert_costs_few_bytes_of_memory(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path, layers=5, experts=256, files=2)
    tracemalloc.start()
    layouts = CheckpointIndex.open(tmp_path)._layouts
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    del layouts
    gc.collect()
    freed = before - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 36 <= freed / (4 * 256) < 128
