import mmap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import BudgetError
from expert_pool import slots as slots_module
from expert_pool.checkpoint_index import ParamSpec
from expert_pool.settings import PoolSettings, expert_memory_bytes
from expert_pool.slots import SlotArena, share_out

layer_specs = st.builds(
    lambda top_k, more, pages: SimpleNamespace(
        top_k=top_k, num_experts=top_k + more, slot_bytes=4096 * pages
    ),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(1, 3),
)


@given(st.lists(layer_specs, min_size=1, max_size=6), st.integers(0, 400))
def test_quotas_are_equal_within_their_bounds(layers, pages):
    budget = pages * 4096
    need = sum(layer.top_k * layer.slot_bytes for layer in layers)
    if budget < need:
        with pytest.raises(BudgetError, match=f"{need} bytes.*have {budget} bytes"):
            share_out(layers, budget)
        return
    quotas = share_out(layers, budget)
    used = sum(q * layer.slot_bytes for q, layer in zip(quotas, layers, strict=True))
    assert used <= budget
    for quota, layer in zip(quotas, layers, strict=True):
        assert layer.top_k <= quota <= layer.num_experts
        # Nothing is left that a layer could have used.
        assert quota == layer.num_experts or budget - used < layer.slot_bytes
    if len({layer.slot_bytes for layer in layers}) == 1:
        for quota, layer in zip(quotas, layers, strict=True):
            # Only its floor can put a layer above another that could still grow.
            for other, its in zip(quotas, layers, strict=True):
                assert quota <= max(other + 1, layer.top_k) or other == its.num_experts


@given(st.integers(1, 9), st.integers(2, 20), st.integers(0, 100))
def test_equal_layers_share_the_remainder_among_the_first(num_layers, num_experts, extra):
    layers = [SimpleNamespace(top_k=2, num_experts=num_experts, slot_bytes=4096)] * num_layers
    total = min(2 * num_layers + extra, num_experts * num_layers)
    quotas = share_out(layers, total * 4096 + 17)
    assert quotas == [total // num_layers + (at < total % num_layers) for at in range(num_layers)]


@pytest.mark.parametrize(
    ("setting", "granted"),
    [("all", 4000), ("100%", 4000), ("0%", 0), ("12.5%", 500), ("2KiB", 2048), (77, 77)],
)
def test_expert_memory_is_all_a_share_or_bytes(setting, granted):
    assert expert_memory_bytes(PoolSettings(expert_memory=setting).expert_memory, 4000) == granted


@pytest.mark.parametrize("setting", ["101%", "some", "-5%", "", None, -1])
def test_other_expert_memory_is_refused(setting):
    with pytest.raises(ValueError, match="expected"):
        PoolSettings(expert_memory=setting)


def test_views_show_parameters_inside_page_aligned_slots():
    params = (
        ParamSpec("up_proj", (3, 4), "bfloat16", 0, 24),
        ParamSpec("down_proj", (4, 3), "float32", 64, 48),
    )
    arena = SlotArena(params, 4096, 5, torch.device("cpu"))
    for number in range(5):
        slot = arena.slot(number)
        assert slot.data_ptr() % mmap.PAGESIZE == 0
        values = torch.full((3, 4), float(number), dtype=torch.bfloat16)
        slot[:24] = values.view(torch.uint8).flatten()
        slot[64:112] = torch.full((48,), number, dtype=torch.uint8)
    for number in range(5):
        assert (arena.views["up_proj"][number] == number).all()
        assert (arena.views["down_proj"][number].view(torch.uint8) == number).all()
    assert arena.views["up_proj"].shape == (5, 3, 4)


def test_more_than_the_machine_has_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(slots_module, "available_bytes", lambda: 10_000)
    with pytest.raises(BudgetError, match=r"need 12288 bytes.*have 10000 bytes"):
        SlotArena((), 4096, 3, torch.device("cpu"))
