from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from core.errors import CheckpointError, SettingsError
from core.model_shape import KvLayerShape
from core.step import SequencePart, StepPlan
from engine.attention_layout import read_layout
from engine.backbone import Backbone
from engine.eos_ids import read_eos_ids
from engine.stock_runner import StockRunner
from expert_pool.checkpoint_index import CheckpointIndex
from tests.engine.forced_steps import CONTEXT_TOKENS, stock_model, token_ids
from tests.models.families import FAMILIES, cached_checkpoint

every_family = pytest.mark.parametrize("family", FAMILIES)
dynamic_rope = pytest.mark.parametrize(
    "family", [row.name for row in FAMILIES.values() if row.rope_threshold_tokens]
)


class NoExperts:
    """Leaves the experts modules empty: for tests that look at the backbone alone."""

    row_offset = 0

    def attach(self, model: torch.nn.Module) -> None:
        self.model = model


def open_backbone(path: Path, dtype: str | None = None, context: int | None = None) -> Backbone:
    return Backbone.open(CheckpointIndex.open(path, dtype), NoExperts(), context_tokens=context)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_family
def test_every_backbone_tensor_equals_stock(family: str, dtype: str) -> None:
    path = cached_checkpoint(family, "float32")
    backbone = open_backbone(path, dtype)
    stock = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    expected = {**dict(stock.named_parameters()), **dict(stock.named_buffers())}
    pooled = {f"{x.module_name}.{p.name}" for x in backbone.index.layers for p in x.params}
    found = {**dict(backbone.model.named_parameters()), **dict(backbone.model.named_buffers())}
    assert pooled
    assert found.keys() == expected.keys() - pooled
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    tied = backbone.model.config.tie_word_embeddings
    head, embedding = (
        model.weight for model in (backbone.model.lm_head, backbone.model.get_input_embeddings())
    )
    assert (head.data_ptr() == embedding.data_ptr()) == tied
    assert backbone.dtype == getattr(torch, dtype)


@every_family
def test_shape_and_kinds_of_state_are_right(family: str) -> None:
    backbone = open_backbone(cached_checkpoint(family), context=CONTEXT_TOKENS)
    shape = backbone.shape
    stock = sum(p.numel() for p in stock_model(family, "float32").parameters())
    loaded = sum(p.numel() * p.element_size() for p in backbone.model.parameters())
    assert shape.total_params == stock
    assert shape.backbone_bytes == loaded
    assert shape.total_params == shape.expert_params + loaded // 4
    assert backbone.state_family == FAMILIES[family].state
    assert backbone.whole_prompt_only == FAMILIES[family].whole_prompt_only
    if not backbone.state_family:
        assert shape.kv_layers == tuple(
            KvLayerShape(
                decoder_layer=x.layer_idx,
                kv_heads=x.kv_heads,
                key_dim=x.key_dim,
                value_dim=x.value_dim,
                window_tokens=x.window.tokens or None,
                shares_layer=x.shares_layer,
            )
            for x in read_layout(backbone.model)
        )


def test_backbone_reads_every_shard() -> None:
    sharded = cached_checkpoint("mixtral", shards=4)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = open_backbone(cached_checkpoint("mixtral")), open_backbone(sharded)
    for (name, a), (_, b) in zip(
        one.model.named_parameters(), many.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "lost", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_a_missing_backbone_tensor_is_refused_by_name(tmp_path: Path, lost: str) -> None:
    path = tmp_path / "model"
    shutil.copytree(cached_checkpoint("mixtral"), path)
    tensors = load_file(path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
        open_backbone(path)


def test_eos_ids_are_united(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<e>"}}))
    tokens = [{"id": 9, "content": "<e>"}, {"id": 3, "content": "<other>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert read_eos_ids(tmp_path, 100) == (5, 7, 9)
    assert read_eos_ids(tmp_path, 8) == (5, 7)


def test_eos_ids_of_a_composite_config_and_of_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [1, 2]}}))
    assert read_eos_ids(tmp_path, 100) == (1, 2)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert read_eos_ids(tmp_path, 100) == ()


def test_context_beyond_the_model_is_refused() -> None:
    path = cached_checkpoint("mixtral")
    with pytest.raises(SettingsError, match="512"):
        open_backbone(path, context=513)
    assert open_backbone(path).context_tokens == 512
    # Dynamic RoPE is made for contexts beyond max_position_embeddings: 32 x factor 4.
    assert open_backbone(cached_checkpoint("hunyuan_v1_moe"), context=128).context_tokens == 128
    with pytest.raises(SettingsError, match="128"):
        open_backbone(cached_checkpoint("hunyuan_v1_moe"), context=129)


def rotary_of(backbone: Backbone, *positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = backbone.model.get_decoder().rotary_emb
    return rotary(torch.zeros(1, 1), torch.tensor([positions]))


@dynamic_rope
def test_rope_factors_depend_on_the_served_context_alone(family: str) -> None:
    threshold = FAMILIES[family].rope_threshold_tokens
    assert threshold is not None
    path = cached_checkpoint(family)
    short, long = open_backbone(path, context=threshold), open_backbone(path, context=64)
    for backbone in (short, long):
        alone = rotary_of(backbone, 3, 9)
        beside = rotary_of(backbone, 3, 9, threshold - 1)
        # A neighbour that grew past the threshold must leave nothing behind either.
        if backbone is long:
            rotary_of(backbone, 63)
        after = rotary_of(backbone, 3, 9)
        for a, b, c in zip(alone, beside, after, strict=True):
            assert torch.equal(a, b[:, :2])
            assert torch.equal(a, c)
    assert not torch.allclose(rotary_of(short, 3, 9)[0], rotary_of(long, 3, 9)[0], atol=1e-3)


@dynamic_rope
@pytest.mark.parametrize("context", [32, 48])
def test_rope_factors_equal_stock_at_the_context_limit(family: str, context: int) -> None:
    path = cached_checkpoint(family)
    stock = AutoModelForCausalLM.from_pretrained(path).get_decoder().rotary_emb
    expected = stock(torch.zeros(1, 1), torch.arange(context)[None])
    found = rotary_of(open_backbone(path, context=context), *range(20))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs[:, :20])


def part(sequence_id: int, start: int, count: int) -> SequencePart:
    return SequencePart(
        sequence_id=sequence_id,
        start=start,
        token_ids=token_ids(9, count),
        block_ids=(),
        is_decode=count == 1,
        wants_logits=True,
    )


class EchoModel(torch.nn.Module):
    """Stands in for a causal LM where only the runner's bookkeeping matters."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
        logits = torch.zeros(1, 1, 320)
        return type("Output", (), {"logits": logits})


def bookkeeping_runner(family: str) -> StockRunner:
    backbone = open_backbone(cached_checkpoint(family), context=CONTEXT_TOKENS)
    backbone.model = EchoModel(backbone.model.config)
    return StockRunner(backbone)


def test_stock_runner_drops_caches_on_release() -> None:
    runner = bookkeeping_runner("qwen3_next")
    runner.run(StepPlan(parts=(part(4, 0, 5), part(6, 0, 3))))
    assert runner.sequence_ids == {4, 6}
    runner.run(StepPlan(parts=(part(6, 3, 1),), released=(4,)))
    assert runner.sequence_ids == {6}
    with pytest.raises(ValueError, match="sequence 4 holds 0 tokens"):
        runner.run(StepPlan(parts=(part(4, 5, 1),)))
    runner.release([6, 99])
    assert not runner.sequence_ids


def test_stock_runner_refuses_a_gap_and_restarts_at_zero() -> None:
    runner = bookkeeping_runner("qwen3_next")
    runner.run(StepPlan(parts=(part(1, 0, 5),)))
    with pytest.raises(ValueError, match="holds 5 tokens, its part starts at 7"):
        runner.run(StepPlan(parts=(part(1, 7, 1),)))
    runner.run(StepPlan(parts=(part(1, 0, 2),)))
    assert runner.run(StepPlan(parts=(part(1, 2, 1),))).shape == (1, 320)
    assert runner.run(StepPlan(parts=())).shape == (0, 320)


def test_stock_runner_refuses_a_second_prompt_part_of_jamba() -> None:
    runner = bookkeeping_runner("jamba")
    runner.run(StepPlan(parts=(part(1, 0, 5),)))
    with pytest.raises(ValueError, match="one part only"):
        runner.run(StepPlan(parts=(part(1, 5, 2),)))
    runner.run(StepPlan(parts=(part(1, 5, 1),)))
