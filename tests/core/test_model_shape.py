"""Byte formulas and activation ratios against hand-worked numbers."""

import pytest

from core.model_shape import KvLayerShape, ModelShape, MoeLayerShape, align_up


def mixtral_like() -> ModelShape:
    """Two layers, 8 experts of 100 parameters, top-2, 400 other parameters."""
    moe = tuple(
        MoeLayerShape(
            ordinal=i,
            decoder_layer=i + 1,
            num_experts=8,
            top_k=2,
            expert_params=100,
            expert_bytes=200,
            slot_bytes=4096,
        )
        for i in range(2)
    )
    kv = (
        KvLayerShape(decoder_layer=0, kv_heads=2, key_dim=16, value_dim=8),
        KvLayerShape(decoder_layer=1, kv_heads=2, key_dim=16, value_dim=8, shares_layer=0),
    )
    return ModelShape(
        model_type="mixtral",
        hidden_size=8,
        vocab_size=10,
        num_layers=3,
        context_limit_tokens=64,
        dtype_bytes=2,
        total_params=2000,
        backbone_bytes=800,
        moe_layers=moe,
        kv_layers=kv,
    )


def test_activation_ratio_on_both_bases() -> None:
    shape = mixtral_like()
    assert shape.expert_params == 1600
    assert shape.token_activation_ratio == pytest.approx((400 + 400) / 2000)
    assert shape.token_expert_activation_ratio == pytest.approx(0.25)


def test_bytes_of_slots_and_kv_blocks() -> None:
    shape = mixtral_like()
    assert shape.all_experts_bytes == 16 * 4096
    assert shape.min_slots_bytes == 4 * 4096
    # One layer stores 2 heads x (16 + 8) values; the other shares them.
    assert shape.kv_block_bytes(block_tokens=16) == 48 * 16 * 2


@pytest.mark.parametrize(("n", "a", "want"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128)])
def test_align_up(n: int, a: int, want: int) -> None:
    assert align_up(n, a) == want
