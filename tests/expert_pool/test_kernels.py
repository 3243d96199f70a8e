"""The native expert kernels: within rounding of the exact result, row by row the same bits."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_pool.kernels import build as building
from expert_pool.kernels.build import BuildError
from expert_pool.kernels.layer_kernel import activation_of, unsupported
from expert_pool.kernels.library import NativeCall, NativeLayer, open_kernels
from tests.expert_pool.native_layers import ACTIVATIONS, kernels_or_skip, make_layer

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


@every_set
@settings(max_examples=100)
@given(
    hidden=st.integers(1, 200),
    inner=st.integers(1, 200),
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    activation=st.sampled_from(ACTIVATIONS),
    gated=st.booleans(),
    biased=st.booleans(),
    threads=st.sampled_from((1, 2)),
    seed=st.integers(0, 9),
)
def test_every_shape_is_within_rounding_of_the_exact_result(
    instructions, hidden, inner, counts, activation, gated, biased, threads, seed
):
    layer = make_layer(hidden, inner, activation, gated, biased, seed=seed)
    kernel = layer.kernel(instructions)
    torch.set_num_threads(threads)
    total = sum(counts)
    hidden_rows = rows_of(total, hidden, seed)
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
@pytest.mark.parametrize(("hidden", "inner"), [(64, 48), (1000, 72), (33, 130)])
def test_a_row_has_the_same_bits_alone_and_among_others_in_any_slot_and_order(
    instructions, hidden, inner
):
    layer = make_layer(hidden, inner, experts=4)
    for name, view in layer.arena.views.items():
        view[3].copy_(view[1])  # the same expert elsewhere
        assert name
    kernel = layer.kernel(instructions)
    rows = rows_of(23, hidden)
    alone = torch.cat(
        [kernel.apply(layer.group([1], [1]), rows, np.array([at]), 1) for at in range(23)]
    )
    for count in range(1, 24):
        pairs = np.arange(count)[::-1]
        for slot in (1, 3):
            many = kernel.apply(layer.group([slot], [count]), rows, pairs, 1)
            assert torch.equal(many, alone[:count].flip(0))
    torch.set_num_threads(2)
    pairs = np.concatenate([np.arange(5), np.arange(23), np.arange(2)])
    several = kernel.apply(layer.group([0, 1, 2], [5, 23, 2]), rows, pairs, 1)
    assert torch.equal(several[5:28], alone)


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
def test_a_row_that_is_not_finite_touches_no_other(instructions):
    layer = make_layer(96, 40)
    kernel = layer.kernel(instructions)
    rows = rows_of(9, 96)
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


@every_set
def test_nothing_is_written_beside_the_outputs(instructions):
    kernels = kernels_or_skip(instructions)
    layer = make_layer(75, 37, biased=True)
    offsets = {param.name: param.slot_offset for param in layer.params}
    rows, count, guard = rows_of(11, 75), 11, 64
    scratch = torch.full((count * 37 + 2 * guard,), 7.0, dtype=torch.bfloat16)
    out = torch.full((count * 75 + 2 * guard,), 7.0, dtype=torch.bfloat16)
    numbers = np.arange(count), np.array([2]), np.array([count])
    kernels.experts(
        NativeLayer(
            hidden=75,
            inner=37,
            gated=1,
            activation=0,
            arena=layer.arena.slot(0).data_ptr(),
            slot_bytes=layer.arena.slot_bytes,
            up=offsets["gate_up_proj"],
            up_bias=offsets["gate_up_proj_bias"],
            down=offsets["down_proj"],
            down_bias=offsets["down_proj_bias"],
        ),
        NativeCall(
            rows.data_ptr(),
            *(array.ctypes.data for array in numbers),
            experts=1,
            top_k=1,
            placed=0,
            scratch=scratch[guard:].data_ptr(),
            out=out[guard:].data_ptr(),
            threads=2,
        ),
    )
    for buffer in (scratch, out):
        assert (buffer[:guard] == 7).all() and (buffer[-guard:] == 7).all()
        assert (buffer[guard:-guard] != 7).any()


GUARDED = """
import ctypes, mmap
import numpy as np
import torch
from tests.expert_pool.native_layers import make_layer

libc = ctypes.CDLL(None, use_errno=True)

def at_the_edge(count):
    # The last byte lies before a page that must not be touched.
    size = -(-2 * count // 4096) * 4096
    block = mmap.mmap(-1, size + 4096)
    edge = ctypes.addressof(ctypes.c_char.from_buffer(block)) + size
    assert libc.mprotect(ctypes.c_void_p(edge), 4096, 0) == 0
    whole = torch.frombuffer(block, dtype=torch.bfloat16, count=size // 2)
    return block, whole[size // 2 - count:]

for instructions in {instructions!r}:
    for hidden, inner in ((33, 31), (77, 45), (128, 64)):
        layer = make_layer(hidden, inner, experts=2)
        kernel = layer.kernel(instructions)
        for rows in (1, 5, 12):
            block, edge = at_the_edge(rows * hidden)
            values = edge.view(rows, hidden)
            values.copy_(torch.randn(rows, hidden))
            kernel.apply(layer.group([1], [rows]), values, np.arange(rows), 1)
print("untouched")
"""


def runs_here(instructions):
    try:
        return open_kernels(instructions) is not None
    except BuildError:
        return False


def test_nothing_is_read_behind_the_rows():
    kernels_or_skip()
    available = [name for name in INSTRUCTIONS if runs_here(name)]
    program = GUARDED.replace("{instructions!r}", repr(available))
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "untouched", result.stderr


def test_no_experts_are_no_work():
    layer = make_layer(32, 16)
    out = layer.kernel().apply(layer.group([], []), rows_of(3, 32), np.zeros(0, dtype=np.int64), 1)
    assert out.shape == (0, 32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_is_known_by_what_it_does(activation, gated):
    module = make_layer(8, 8, activation, gated).module()
    assert activation_of(module) == ACTIVATIONS.index(activation)


def test_other_activations_and_layouts_are_left_to_torch():
    layer = make_layer(8, 8)
    module = layer.module()
    assert unsupported(module, layer.params) is None
    module.is_transposed = True
    assert "transposed" in unsupported(module, layer.params)
    module.is_transposed = False
    module._apply_gate = lambda x: torch.tanh(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
    assert "activation" in unsupported(module, layer.params)
    # Interleaved gates with a right activation.
    module._apply_gate = lambda x: torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2]
    assert "activation" in unsupported(module, layer.params)


def test_unknown_instructions_are_refused():
    kernels_or_skip()
    with pytest.raises(BuildError, match="sse9"):
        open_kernels("sse9")


def test_without_a_compiler_the_build_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "folder", lambda: tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        building.build()
    monkeypatch.setattr(sys, "argv", ["build", "--optional"])
    with pytest.raises(SystemExit) as ended:
        building.main()
    assert ended.value.code == 0


def test_a_library_of_other_sources_is_not_loaded(monkeypatch):
    monkeypatch.setattr(building, "fingerprint", lambda: "other")
    open_kernels.cache_clear()
    with pytest.raises(BuildError, match="make kernels"):
        open_kernels()
    open_kernels.cache_clear()


def test_the_structures_have_the_size_that_the_sources_expect():
    assert ctypes.sizeof(NativeLayer) == ctypes.sizeof(NativeCall) == 80
