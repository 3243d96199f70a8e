"""What the native kernels touch: their inputs and outputs, no byte beside them."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import torch

from expert_pool.kernels.build import BuildError
from expert_pool.kernels.library import NativeCall, NativeLayer, open_kernels
from tests.expert_pool.native_layers import LAYOUTS, kernels_or_skip, make_layer

INSTRUCTIONS = ("native", "avx2", "generic")
every_set = pytest.mark.parametrize("instructions", INSTRUCTIONS)


@every_set
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_written_beside_the_outputs(instructions, layout):
    kernels = kernels_or_skip(instructions)
    layer = make_layer(75, 37, biased=True, layout=layout)
    offsets = {param.name: param.slot_offset for param in layer.params}
    rows, count, guard = torch.randn(11, 75).bfloat16(), 11, 64
    scratch = torch.full((count * 37 + 2 * guard,), 7.0, dtype=torch.bfloat16)
    out = torch.full((count * 75 + 2 * guard,), 7.0, dtype=torch.bfloat16)
    numbers = np.arange(count), np.array([2]), np.array([count])
    kernels.experts(
        NativeLayer(
            hidden=75,
            inner=37,
            gated=1,
            activation=0,
            transposed=int(layout != "rows"),
            interleaved=int(layout == "interleaved"),
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
from expert_pool.kernels.library import open_kernels
from tests.expert_pool.native_layers import LAYOUTS, make_layer

libc = ctypes.CDLL(None, use_errno=True)
blocks = []

def at_the_edge(values):
    # Their last byte lies before a page that must not be touched.
    size = -(-2 * values.numel() // 4096) * 4096
    block = mmap.mmap(-1, size + 4096)
    blocks.append(block)
    edge = ctypes.addressof(ctypes.c_char.from_buffer(block)) + size
    assert libc.mprotect(ctypes.c_void_p(edge), 4096, 0) == 0
    whole = torch.frombuffer(block, dtype=torch.bfloat16, count=size // 2)
    found = whole[size // 2 - values.numel():].view(values.shape)
    found.copy_(values)
    return found

torch.set_num_threads(1)
for instructions in {instructions!r}:
    kernels = open_kernels(instructions)
    for layout in LAYOUTS:
        for hidden, inner in ((33, 31), (128, 64), (1, 1), (300, 271)):
            for last in ("up", "down"):
                layer = make_layer(hidden, inner, experts=2, layout=layout)
                kernel = layer.kernel(instructions)
                # The slots again, the last one's last parameter at the edge, and no padding.
                up = layer.arena.views["gate_up_proj"][1].reshape(-1)
                down = layer.arena.views["down_proj"][1].reshape(-1)
                slot = at_the_edge(torch.cat((down, up) if last == "up" else (up, down)))
                native = kernel._layer
                native.up, native.down = (0, 2 * up.numel())
                if last == "up":
                    native.up, native.down = 2 * down.numel(), 0
                native.arena = slot.data_ptr() - native.slot_bytes
                for rows in (1, 5, 30):
                    values = at_the_edge(torch.randn(rows, hidden))
                    group = layer.group([1], [rows])
                    found = kernel.apply(group, values, np.arange(rows), 1)
                    inside = layer.kernel(instructions)
                    assert torch.equal(found, inside.apply(group, values, np.arange(rows), 1))
    for depth, width in ((33, 31), (1, 1), (130, 65)):
        weight = at_the_edge(torch.randn(width, depth))
        bias = at_the_edge(torch.randn(width))
        for rows in (1, 7):
            kernels.linear(at_the_edge(torch.randn(rows, depth)), weight, bias)
            kernels.combine(at_the_edge(torch.randn(2 * rows, depth)), torch.rand(rows, 2))
print("untouched")
"""


def runs_here(instructions):
    try:
        return open_kernels(instructions) is not None
    except BuildError:
        return False


def test_nothing_is_read_behind_rows_and_slots():
    kernels_or_skip()
    available = [name for name in INSTRUCTIONS if runs_here(name)]
    program = GUARDED.replace("{instructions!r}", repr(available))
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "untouched", f"{result.returncode} {result.stderr}"


def call(layer, hidden=None, pairs=None, slots=(0,), counts=(4,), by_pair=None):
    hidden = torch.randn(4, 32).bfloat16() if hidden is None else hidden
    pairs = np.arange(4) if pairs is None else np.array(pairs)
    return layer.kernel().apply(layer.group(list(slots), list(counts)), hidden, pairs, 1, by_pair)


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": (5,)},
        {"counts": (3,)},
        {"pairs": [0, 1, 2, 4]},
        {"pairs": [0, 1, 2, -1]},
        {"slots": (3,)},
        {"slots": (-1,)},
        {"hidden": torch.zeros(4, 31).bfloat16()},
        {"hidden": torch.zeros(4, 32)},
        {"by_pair": torch.zeros(3, 32).bfloat16()},
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_are_refused_before_memory_is_touched(wrong):
    layer = make_layer(32, 16)
    assert call(layer).shape == (4, 32)
    with pytest.raises(ValueError, match="expected bf16 rows of 32 values"):
        call(layer, **wrong)


def test_slots_of_another_arena_are_refused():
    layer, other = make_layer(32, 16), make_layer(32, 16)
    with pytest.raises(ValueError, match="this layer"):
        layer.kernel().apply(other.group([0], [1]), torch.zeros(1, 32).bfloat16(), np.arange(1), 1)


def test_torch_threads_that_fail_are_an_error():
    layer = make_layer(512, 256)
    kernel = layer.kernel()
    broken = ctypes.CFUNCTYPE(
        ctypes.c_int32, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p
    )(lambda *_: 1)
    kernels = open_kernels("native")
    before, threads = kernels._parallel_for, torch.get_num_threads()
    kernels._parallel_for = ctypes.cast(broken, ctypes.c_void_p).value
    torch.set_num_threads(2)
    try:
        rows, weight = torch.zeros(1, 512).bfloat16(), torch.zeros(512, 512).bfloat16()
        with pytest.raises(RuntimeError, match="threads failed"):
            kernel.apply(layer.group([0], [1]), rows, np.arange(1), 1)
        with pytest.raises(RuntimeError, match="threads failed"):
            kernels.linear(rows, weight, None)
    finally:
        kernels._parallel_for = before
        torch.set_num_threads(threads)


def test_the_structures_have_the_size_that_the_sources_expect():
    assert ctypes.sizeof(NativeLayer) == 104
    assert ctypes.sizeof(NativeCall) == 80
