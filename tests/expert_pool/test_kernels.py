"""The native expert kernels: within rounding of the exact result, row by row the same bits."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expert_pool.native_layers import ACTIVATIONS, CLAMPED, LAYOUTS, make_layer

INSTRUCTIONS = ("native", "avx2", "generic")
every_set = pytest.mark.parametrize("instructions", INSTRUCTIONS)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_of(count, hidden, seed=0):
    return torch.randn((count, hidden), generator=torch.Generator().manual_seed(seed)).bfloat16()


KINDS = [
    (layout, activation, gated)
    for layout in LAYOUTS
    for activation in (*ACTIVATIONS, CLAMPED)
    for gated in (True, False)
    if gated or (layout != "interleaved" and activation != CLAMPED)
]


@every_set
@settings(max_examples=150)
@given(
    hidden=st.integers(1, 300),
    inner=st.integers(1, 300),
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    biased=st.booleans(),
    threads=st.sampled_from((1, 2)),
    seed=st.integers(0, 9),
)
def test_every_shape_is_within_rounding_of_the_exact_result(
    instructions, hidden, inner, counts, kind, biased, threads, seed
):
    layout, activation, gated = kind
    layer = make_layer(hidden, inner, activation, gated, biased, seed=seed, layout=layout)
    kernel = layer.kernel(instructions)
    torch.set_num_threads(threads)
    total = sum(counts)
    hidden_rows = rows_of(max(1, total), hidden, seed)
    order = np.random.default_rng(seed).permutation(total)
    slots = list(range(len(counts)))
    found = kernel.apply(layer.group(slots, counts), hidden_rows, order, 1)
    start = 0
    for slot, count in zip(slots, counts, strict=True):
        exact, error = layer.exact(hidden_rows[order[start : start + count]], slot)
        off = (found[start : start + count].double() - exact).abs()
        assert (off <= error).all(), f"{(off / error).max():.2f} times the bound"
        start += count


@every_set
@pytest.mark.parametrize(
    ("layout", "hidden", "inner"),
    [
        ("rows", 64, 48),
        ("rows", 1000, 72),
        ("rows", 33, 130),
        ("transposed", 129, 301),
        ("interleaved", 333, 280),
    ],
)
def test_a_row_has_the_same_bits_alone_and_among_others_in_any_slot_and_order(
    instructions, layout, hidden, inner
):
    layer = make_layer(hidden, inner, experts=4, layout=layout)
    for name, view in layer.arena.views.items():
        view[3].copy_(view[1])  # the same expert elsewhere
        assert name
    kernel = layer.kernel(instructions)
    rows = rows_of(53, hidden)
    alone = torch.cat(
        [kernel.apply(layer.group([1], [1]), rows, np.array([at]), 1) for at in range(53)]
    )
    for count in (*range(1, 26), 53):
        pairs = np.arange(count)[::-1]
        for slot in (1, 3):
            many = kernel.apply(layer.group([slot], [count]), rows, pairs, 1)
            assert torch.equal(many, alone[:count].flip(0))
    torch.set_num_threads(2)
    pairs = np.concatenate([np.arange(5), np.arange(23), np.arange(2)])
    several = kernel.apply(layer.group([0, 1, 2], [5, 23, 2]), rows, pairs, 1)
    assert torch.equal(several[5:28], alone[:23])


def test_threads_wait_for_what_others_compute():
    # Several blocks of both projections: down must not begin before all of up is there.
    layer = make_layer(1024, 256)
    kernel, group = layer.kernel(), layer.group([0], [24])
    # In turn, as memory that is used again may still hold the right values.
    inputs = [rows_of(24, 1024, seed) for seed in range(2)]
    alone = [kernel.apply(group, rows, np.arange(24), 1) for rows in inputs]
    torch.set_num_threads(2)
    for turn in range(200):
        found = kernel.apply(group, inputs[turn % 2], np.arange(24), 1)
        assert torch.equal(found, alone[turn % 2])


@every_set
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_is_not_finite_touches_no_other(instructions, layout):
    layer = make_layer(95, 41, layout=layout)
    kernel = layer.kernel(instructions)
    rows = rows_of(9, 95)
    before = kernel.apply(layer.group([0], [9]), rows, np.arange(9), 1)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoilt = rows.clone()
        spoilt[4, 17] = bad
        after = kernel.apply(layer.group([0], [9]), spoilt, np.arange(9), 1)
        assert not after[4].isfinite().all()
        keep = [at for at in range(9) if at != 4]
        assert torch.equal(after[keep], before[keep])


@every_set
def test_extreme_gates_stay_finite_where_stock_does(instructions):
    for activation in ("silu", "gelu_tanh", "gelu"):
        layer = make_layer(32, 16, activation, gated=False)
        layer.arena.views["up_proj"][0].copy_(100 * torch.eye(16, 32))
        layer.arena.views["down_proj"][0].copy_(torch.eye(32, 16))
        values = torch.tensor([-1e4, -300, -5, -0.89, -0.01, 0, 0.01, 0.89, 5, 300, 1e4, -88, 88])
        rows = torch.zeros(1, 32)
        rows[0, :13] = values / 100
        rows = rows.bfloat16()
        found = layer.kernel(instructions).apply(layer.group([0], [1]), rows, np.array([0]), 1)
        exact, error = layer.exact(rows, 0)
        assert ((found.double() - exact).abs() <= error).all()


@every_set
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_pairs_land_in_their_places_and_are_combined_in_router_order(instructions, weights_dtype):
    layer = make_layer(200, 24)
    kernel = layer.kernel(instructions)
    rows, top_k = rows_of(7, 200), 2
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2], [2, 0], [0, 2]])
    weights = torch.rand(7, 2).to(weights_dtype)
    order = np.argsort(chosen.reshape(-1).numpy(), kind="stable")
    by_pair = torch.full((14, 200), float("nan"), dtype=torch.bfloat16)
    kernel.apply(
        layer.group([0, 1, 2], np.bincount(chosen.reshape(-1)).tolist()),
        rows,
        order,
        top_k,
        by_pair,
    )
    for pair in range(14):
        one = kernel.apply(
            layer.group([int(chosen.reshape(-1)[pair])], [1]), rows, np.array([pair]), top_k
        )
        assert torch.equal(by_pair[pair], one[0])
    sums = (by_pair.view(7, 2, 200).float() * weights.float().unsqueeze(-1)).sum(1)
    found = kernel.combine(by_pair, weights)
    assert found.dtype == torch.bfloat16
    assert ((found.float() - sums).abs() <= 2.0**-8 * sums.abs() + 1e-6).all()


def test_no_experts_are_no_work():
    layer = make_layer(32, 16)
    out = layer.kernel().apply(layer.group([], []), rows_of(3, 32), np.zeros(0, dtype=np.int64), 1)
    assert out.shape == (0, 32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_without_rows_is_no_work(layout):
    layer = make_layer(320, 280, layout=layout)
    rows = rows_of(4, 320)
    alone = layer.kernel().apply(layer.group([1], [4]), rows, np.arange(4), 1)
    torch.set_num_threads(2)
    found = layer.kernel().apply(layer.group([0, 1, 2], [0, 4, 0]), rows, np.arange(4), 1)
    assert torch.equal(found, alone)


def test_rows_with_gaps_between_them_are_no_matter():
    layer = make_layer(96, 40)
    rows = rows_of(5, 192)[:, ::2]
    group = layer.group([0], [5])
    kernel = layer.kernel()
    found = kernel.apply(group, rows, np.arange(5), 1)
    assert torch.equal(found, kernel.apply(group, rows.contiguous(), np.arange(5), 1))
    one = rows_of(1, 96).expand(5, 96)
    found = kernel.apply(group, one, np.arange(5)[::-1], 1)
    assert all(torch.equal(found[0], row) for row in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_may_call_at_once_and_use_as_many_threads_as_they_like(layout):
    layer = make_layer(512, 256, layout=layout)
    kernel, group = layer.kernel(), layer.group([0, 2], [20, 7])
    inputs = [rows_of(27, 512, seed) for seed in range(3)]
    alone = [kernel.apply(group, rows, np.arange(27), 1) for rows in inputs]
    wrong: list[int] = []

    def compute(number):
        for turn in range(20):
            torch.set_num_threads(1 + (turn + number) % 5)
            found = kernel.apply(group, inputs[number], np.arange(27), 1)
            if not torch.equal(found, alone[number]):
                wrong.append(turn)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_come_out_in_inference_mode_as_elsewhere(layout):
    layer = make_layer(64, 32, layout=layout)
    rows = rows_of(3, 64)
    found = layer.kernel().apply(layer.group([0], [3]), rows, np.arange(3), 1)
    with torch.inference_mode():
        again = layer.kernel().apply(layer.group([0], [3]), rows * 1, np.arange(3), 1)
        assert torch.equal(found, again)
