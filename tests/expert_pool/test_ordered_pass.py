"""Many rows at once: each expert is read once a pass, and its place changes no bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from expert_pool.layer_major import layer_major
from expert_pool.tables import State
from tests.contract.test_pool_cases import PeakBytes
from tests.expert_pool.fake_experts import (
    KINDS,
    FakeIndex,
    FakeModel,
    FakeShape,
    FaultyReader,
    random_routing,
)
from tests.expert_pool.test_pool import open_pool, slots_bytes

SHAPE = FakeShape(num_layers=3, num_experts=12, top_k=3)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return FakeIndex(tmp_path_factory.mktemp("ordered"), SHAPE)


def run_pass(pool, model: FakeModel, shape: FakeShape = SHAPE, rows: int = 60, seed: int = 0):
    """All layers, layer-major: outputs and what the pool counted."""
    pool.begin_step()
    with layer_major():
        outputs = [
            model.layers[layer](*random_routing(shape, rows, seed + layer))
            for layer in range(shape.num_layers)
        ]
    return outputs, pool.end_step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_with_any_number_of_slots(tmp_path, kind, dtype):
    shape = FakeShape(num_layers=2, num_experts=12, top_k=3, kind=kind, dtype=dtype)
    index = FakeIndex(tmp_path, shape)
    pool, model = open_pool(index)
    expected, _ = run_pass(pool, model, shape)
    for ours, layer in zip(expected, range(2), strict=True):
        stock = model.stock(layer, *random_routing(shape, 60, layer))
        torch.testing.assert_close(ours, stock)
    pool.close()
    for slots in (3, 4, 7, 11, 12):
        for policy in ("lru", "lfu"):
            pool, model = open_pool(index, expert_memory=slots_bytes(index, slots), policy=policy)
            for _ in range(2):
                outputs, _ = run_pass(pool, model, shape)
                pool.settle()
                pool.check_invariants()
                for ours, right in zip(outputs, expected, strict=True):
                    assert torch.equal(ours, right), (slots, policy)
            pool.close()


@pytest.mark.parametrize("slots", [3, 5, 8, 11, 12])
def test_m20_a_pass_reads_each_expert_once_at_most(index, slots):
    """club-3090#929: a long prefill read more with the cache on than plain streaming does."""
    reader = FaultyReader(index)
    pool, model = open_pool(index, reader, expert_memory=slots_bytes(index, slots))
    _, stats = run_pass(pool, model, rows=300)
    everything = SHAPE.num_layers * SHAPE.num_experts
    assert stats.demand_hits + stats.demand_misses == everything
    pool.settle()
    assert len(reader.reads) == len(set(reader.reads)) == everything
    assert stats.bytes_read <= everything * index.record_bytes
    # What was resident before is computed with, but for the slots that serve as buffers.
    reader.reads.clear()
    run_pass(pool, model, rows=300)
    pool.settle()
    assert len(reader.reads) == len(set(reader.reads))
    kept = max(0, slots - 2) if slots < 12 else 12
    assert len(reader.reads) <= SHAPE.num_layers * (12 - kept)
    pool.close()


def test_a_pass_leaves_the_experts_that_decoding_lives_on_where_they_are(index):
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 6))
    hot = [(layer, expert) for layer in range(3) for expert in (1, 4, 7, 9)]
    for _ in range(3):
        pool.preload(hot)
        pool.settle()
        pool.begin_step()
        for layer in range(3):
            pool.demand(layer, torch.bincount(torch.tensor([1, 4, 7, 9]), minlength=12).numpy(), 4)
        pool.end_step()
    run_pass(pool, model, rows=200)
    pool.settle()
    resident = pool.residency.states.state == 2
    assert sum(bool(resident[pair]) for pair in hot) == len(hot)
    pool.close()


def test_experts_read_early_in_vain_take_no_buffer(index):
    """The layer after a dense one may not ask for the experts whose reads it had begun."""
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, 5))
    pool.begin_step()
    for _ in pool.demand(0, np.full(12, 5), 20, in_order=True):
        pass
    early = list(pool.read_early[1])
    assert early
    wanted = np.full(12, 5)
    wanted[early] = 0
    row = pool.residency.states.state[1]
    read_ahead = [
        int(np.count_nonzero(row[int(expert[0]) + 1 :] != State.UNLOADED))
        for expert in pool.demand(1, wanted, 20, in_order=True)
    ]
    assert min(read_ahead[:-1]) >= 1, "the next one is read while this one is computed"
    pool.end_step()
    pool.settle()
    pool.check_invariants()
    pool.close()


def test_an_expert_that_cannot_be_read_fails_its_rows_alone(index):
    reader = FaultyReader(index)
    routed = random_routing(SHAPE, 40, 0)
    victim = int(routed[1][0, 0])
    reader.faults[0, victim] = ["error", "error"]
    pool, model = open_pool(index, reader, expert_memory=slots_bytes(index, 4))
    (out, *_), stats = run_pass(pool, model, rows=40)
    needed = (routed[1] == victim).any(dim=1)
    assert stats.failed_rows == tuple(needed.nonzero().flatten().tolist())
    torch.testing.assert_close(out[~needed], model.stock(0, *routed)[~needed])
    pool.check_invariants()
    pool.close()


@pytest.mark.parametrize("slots", [3, 12])
def test_m13_an_experts_rows_are_cut_to_the_scratch_budget(index, slots):
    """KTransformers#1676: 8k tokens at once, most of them to one expert."""
    budget = 2**20
    pool, model = open_pool(index, expert_memory=slots_bytes(index, slots), scratch_bytes=budget)
    routed = random_routing(SHAPE, 8192, 1)
    pool.begin_step()
    with layer_major(), PeakBytes() as memory:
        out = model.layers[0](*routed)
    pool.end_step()
    sums = out.numel() * 4
    order = routed[1].numel() * 8 * 5  # the sort of the router's choice
    assert memory.peak <= 2 * sums + order + budget
    torch.testing.assert_close(out, model.stock(0, *routed), rtol=1e-4, atol=1e-4)
    pool.close()


def test_a_pass_knows_nothing_of_one_that_broke_off(index):
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, 5))
    pool.begin_step()
    for _ in pool.demand(0, np.full(12, 5), 20, in_order=True):
        pass
    assert pool.read_early[1]
    pool.end_step()  # layer 1 is never asked
    pool.settle()
    pool.begin_step()
    few = np.zeros(12, dtype=np.int64)
    few[3] = 2
    for _ in pool.demand(0, few, 2, in_order=True):
        assert pool.in_ordered_pass
    assert not pool.read_early
    assert not pool.in_ordered_pass
    pool.end_step()
    pool.close()


def test_misses_of_a_pass_over_several_steps_are_counted_where_their_reads_end(index):
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, 3))
    pool.begin_step()
    groups = iter(pool.demand(0, np.full(12, 5), 20, in_order=True))
    next(groups)
    pool.residency.states.unpin(0, np.array([0]))  # as between two slices
    first = pool.end_step()
    assert (first.demand_misses, first.host_misses) == (12, 0)
    assert first.disk_misses < 12
    pool.begin_step()
    pool.residency.states.pin(0, np.array([0]))
    for _ in groups:
        pass
    assert first.disk_misses + pool.end_step().disk_misses == 12
    pool.close()
