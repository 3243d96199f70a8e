import logging
import threading

import numpy as np
import pytest
import torch

from core.errors import BudgetError, CheckpointError, CoterieError
from expert_pool.checksums import ChecksumBook
from expert_pool.experts_forward import experts_forward
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from expert_pool.tables import ResidencyViolation, State
from tests.expert_pool.fake_experts import (
    KINDS,
    FakeIndex,
    FakeModel,
    FakeShape,
    FaultyReader,
    random_routing,
)


def open_pool(index, reader=None, clock=None, **settings) -> tuple[ExpertPool, FakeModel]:
    extra = {"clock": clock} if clock else {}
    # Prefetch reads when it can: what a test counts would depend on time.
    settings.setdefault("prefetch", "off")
    # What a test has just written lies in the page cache: reads would not count as reads.
    chosen = PoolSettings(**{"host_memory": "off", **settings})
    pool = ExpertPool(index, chosen, reader=reader, **extra)
    model = FakeModel(index)
    pool.attach(model)
    return pool, model


def slots_bytes(index, slots_a_layer: int) -> int:
    return sum(layer.slot_bytes for layer in index.layers) * slots_a_layer


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 128])
def test_output_is_bitwise_stock_for_every_residency(tmp_path, kind, dtype, weight_dtype, width):
    shape = FakeShape(num_layers=2, num_experts=16, top_k=3, kind=kind, dtype=dtype, width=width)
    index = FakeIndex(tmp_path, shape)
    for memory in (slots_bytes(index, 3), slots_bytes(index, 5), "all"):
        pool, model = open_pool(index, expert_memory=memory, kernel="torch")
        for step, rows in enumerate((1, 2, 7, 40, 1)):
            pool.begin_step()
            for layer in range(2):
                routed = random_routing(shape, rows, 10 * step + layer, weight_dtype)
                ours = model.layers[layer](*routed)
                stock = model.stock(layer, *routed)
                assert ours.dtype == stock.dtype
                assert torch.equal(ours, stock), (memory, step, layer)
            stats = pool.end_step()
            assert stats.routed_pairs == rows * 3 * 2
            pool.check_invariants()
        assert (memory == "all") == (pool.residency.quotas[0] == 16)
        pool.close()


def test_a_full_layer_runs_on_one_strided_region(tmp_path, monkeypatch):
    shape = FakeShape(num_layers=1, num_experts=8, top_k=4)
    index = FakeIndex(tmp_path, shape)
    pool, model = open_pool(index)
    pool.preload([(0, e) for e in (5, 1, 0, 7, 2, 3, 6, 4)])
    pool.settle()
    assert pool.resident_counts().tolist() == [8]
    assert pool.residency.ordered_from(0) == 0
    seen = []
    real = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional,
        "grouped_mm",
        lambda rows, weight, offs: seen.append(weight.shape) or real(rows, weight, offs=offs),
    )
    routed = random_routing(shape, 20, 1)
    pool.begin_step()
    ours = model.layers[0](*routed)
    pool.end_step()
    assert [tuple(s) for s in seen] == [(8, 64, 64), (8, 32, 64)]
    assert torch.equal(ours, model.stock(0, *routed))
    pool.close()


def test_counts_agree_with_a_simple_count(tmp_path):
    shape = FakeShape(num_layers=3, num_experts=8, top_k=2)
    index = FakeIndex(tmp_path, shape)
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 5), policy="lru")
    resident: list[list[int]] = [[] for _ in range(3)]
    loads = np.zeros((3, 8), dtype=np.int64)
    for step in range(12):
        pool.begin_step()
        expected = {"hits": 0, "misses": 0, "evictions": 0}
        tokens = 1 + step % 3
        for layer in range(3):
            routed = random_routing(shape, tokens, 3 * step + layer)
            asked = sorted(set(routed[1].flatten().tolist()))
            np.add.at(loads[layer], routed[1].flatten().numpy(), 1)
            model.layers[layer](*routed)
            if len(asked) > 5:
                raise AssertionError("choose another seed: this model has no waves")
            hits = [e for e in asked if e in resident[layer]]
            expected["hits"] += len(hits)
            expected["misses"] += len(asked) - len(hits)
            kept = [e for e in resident[layer] if e not in asked]
            drop = max(0, len(kept) + len(asked) - 5)
            expected["evictions"] += drop
            resident[layer] = kept[drop:] + asked
        stats = pool.end_step()
        assert (stats.demand_hits, stats.demand_misses) == (expected["hits"], expected["misses"])
        assert stats.evictions == expected["evictions"]
        assert stats.records_read == expected["misses"]
        assert stats.bytes_read == stats.records_read * index.record_bytes
        assert stats.routed_pairs == tokens * 2 * 3
        assert stats.waves == 3
        assert stats.stall_s > 0 or expected["hits"] > 0
        for layer in range(3):
            row = pool.residency.states.state[layer]
            assert np.flatnonzero(row == State.RESIDENT).tolist() == sorted(resident[layer])
    assert np.array_equal(pool.loads, loads)
    pool.close()


def test_a_second_call_of_a_layer_in_a_step_is_no_second_access(tmp_path):
    shape = FakeShape(num_layers=1)
    index = FakeIndex(tmp_path, shape)
    pool, model = open_pool(index)
    routed = random_routing(shape, 4, 0)
    distinct = len(set(routed[1].flatten().tolist()))
    pool.begin_step()
    model.layers[0](*routed)
    pool.row_offset = 4
    model.layers[0](*routed)
    stats = pool.end_step()
    assert (stats.demand_hits, stats.demand_misses) == (0, distinct)
    assert stats.routed_pairs == 2 * 4 * 2
    pool.begin_step()
    assert pool.row_offset == 0
    model.layers[0](*routed)
    stats = pool.end_step()
    assert (stats.demand_hits, stats.demand_misses) == (distinct, 0)
    pool.close()


def test_preload_fills_free_slots_and_spares_what_it_names(tmp_path):
    shape = FakeShape(num_layers=2)
    index = FakeIndex(tmp_path, shape)
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, 3), read_threads=1)
    pool.preload([(0, 1), (1, 4), (0, 2), (0, 1)])
    pool.settle()
    assert pool.resident_counts().tolist() == [2, 1]
    pool.preload([(0, 1), (0, 6), (0, 7), (0, 5)])
    pool.settle()
    row = pool.residency.states.state[0]
    assert np.flatnonzero(row == State.RESIDENT).tolist() == [1, 6, 7]
    pool.check_invariants()
    pool.close()


def test_move_quota_between_layers(tmp_path):
    shape = FakeShape(num_layers=2)
    index = FakeIndex(tmp_path, shape)
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 4))
    pool.preload([(layer, e) for layer in range(2) for e in range(4)])
    pool.move_quota(0, 1, 2)
    assert pool.residency.quotas == [2, 6]
    pool.settle()
    assert pool.resident_counts().tolist() == [2, 4]
    with pytest.raises(BudgetError, match="needs 2"):
        pool.move_quota(0, 1)
    routed = random_routing(shape, 9, 0)
    pool.begin_step()
    for layer in range(2):
        assert torch.equal(model.layers[layer](*routed), model.stock(layer, *routed))
    pool.end_step()
    pool.check_invariants()
    pool.close()


def test_a_step_that_raises_leaves_the_pool_usable(tmp_path, monkeypatch):
    shape = FakeShape(num_layers=1, num_experts=8, top_k=3)
    index = FakeIndex(tmp_path, shape)
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 3))
    routed = random_routing(shape, 10, 0)
    calls = []

    def break_off(gate_up):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("in the middle")
        return type(model.layers[0])._apply_gate(model.layers[0], gate_up)

    monkeypatch.setattr(model.layers[0], "_apply_gate", break_off, raising=False)
    pool.begin_step()
    with pytest.raises(RuntimeError, match="in the middle"):
        model.layers[0](*routed)
    pool.end_step()
    pool.settle()
    pool.check_invariants()
    pool.begin_step()
    assert torch.equal(model.layers[0](*routed), model.stock(0, *routed))
    pool.end_step()
    pool.check_invariants()
    pool.close()


def test_no_tokens_is_no_work(tmp_path):
    index = FakeIndex(tmp_path, FakeShape())
    pool, model = open_pool(index)
    pool.begin_step()
    empty = model.layers[0](torch.empty(0, 64), torch.empty(0, 2).long(), torch.empty(0, 2))
    assert empty.shape == (0, 64)
    assert pool.end_step().waves == 0
    pool.close()


def test_checksums_are_learned_once_and_kept(tmp_path):
    index = FakeIndex(tmp_path, FakeShape(num_layers=1))
    pool, _ = open_pool(index)
    pool.preload([(0, 2), (0, 3)])
    pool.settle()
    pool.close()
    book = ChecksumBook(index)
    assert book.num_known == 2
    reader = FaultyReader(index)
    reader.faults[0, 2] = ["flip"]
    pool, _ = open_pool(index, reader)
    pool.preload([(0, 2)])
    pool.settle()
    assert pool.stats.rereads == 1
    pool.close()
    unchecked, _ = open_pool(index, verify_checksums=False)
    unchecked.preload([(0, 5)])
    unchecked.settle()
    unchecked.close()
    assert ChecksumBook(index).num_known == 2


def test_checksums_are_saved_while_serving(tmp_path):
    now = [0.0]
    index = FakeIndex(tmp_path, FakeShape(num_layers=1))
    pool, _ = open_pool(index, clock=lambda: now[0])
    pool.preload([(0, 2)])
    pool.settle()
    pool.begin_step()
    pool.end_step()
    assert ChecksumBook(index).num_known == 0
    now[0] += 31
    pool.begin_step()
    pool.end_step()
    assert ChecksumBook(index).num_known == 1
    pool.close()


def test_attach_checks_the_module_and_forward_wants_a_pool(tmp_path):
    index = FakeIndex(tmp_path, FakeShape())
    pool, _ = open_pool(index)
    other = FakeModel(FakeIndex(tmp_path / "other", FakeShape(kind="ungated")))
    with pytest.raises(CheckpointError, match=r"layers\.0.*up_proj"):
        pool.attach(other)
    with pytest.raises(CoterieError, match="attach"):
        experts_forward(torch.nn.Module(), *random_routing(index.shape, 2, 0))
    pool.close()


def test_end_of_step_finds_a_forgotten_pin(tmp_path):
    index = FakeIndex(tmp_path, FakeShape())
    pool, _ = open_pool(index)
    pool.preload([(0, 1)])
    pool.settle()
    pool.begin_step()
    pool.residency.states.pin(0, np.array([1]))
    with pytest.raises(ResidencyViolation, match="pinned"):
        pool.end_step()
    pool.close()


def test_pinned_memory_that_cannot_be_had_is_said_and_replaced(monkeypatch, caplog):
    from expert_pool.store import _Workspace

    real = torch.empty

    def no_pins(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("cannot pin")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", no_pins)
    with caplog.at_level(logging.WARNING):
        assert _Workspace().pinned(64).numel() == 64
    assert "pageable" in caplog.text


def test_hot_experts_never_leave(tmp_path):
    shape = FakeShape(num_layers=2, num_experts=12, top_k=2)
    index = FakeIndex(tmp_path, shape)
    hot = {0: [3, 9], 1: [0]}
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 4), hot_set=hot)
    pool.settle()
    for step in range(30):
        pool.begin_step()
        for layer in range(2):
            routed = random_routing(shape, 1 + 9 * (step % 3), 2 * step + layer)
            assert torch.equal(model.layers[layer](*routed), model.stock(layer, *routed))
        pool.end_step()
        pool.evict([(0, 3)])
        pool.preload([(0, e) for e in range(12)])
        pool.settle()
        for layer, experts in hot.items():
            assert (pool.residency.states.state[layer][experts] == State.RESIDENT).all()
    with pytest.raises(BudgetError, match="needs 4"):
        pool.move_quota(0, 1)
    pool.move_quota(1, 0)
    pool.check_invariants()
    pool.close()


@pytest.mark.parametrize(
    ("hot_set", "message"),
    [
        ({2: [0]}, r"expected MoE layers 0\.\.1, found 2"),
        ({0: [12]}, r"experts 0\.\.11, found 12\.\.12"),
        ({1: [0, 1, 2]}, "has 4 slots, of which 2 must be left to other experts; found 3 hot ones"),
    ],
)
def test_a_hot_set_that_cannot_be_is_refused(tmp_path, hot_set, message):
    index = FakeIndex(tmp_path, FakeShape(num_layers=2, num_experts=12, top_k=2))
    with pytest.raises(BudgetError, match=message):
        open_pool(index, expert_memory=slots_bytes(index, 4), hot_set=hot_set)


def test_a_quota_move_waits_for_no_other_layers_preloads(tmp_path):
    index = FakeIndex(tmp_path, FakeShape(num_layers=3, num_experts=12, top_k=2))
    gate, entered = threading.Event(), threading.Event()

    class HeldReader(FaultyReader):
        def read(self, file, offset, into):
            entered.set()
            assert gate.wait(30)
            super().read(file, offset, into)

    pool, _ = open_pool(
        index, HeldReader(index), expert_memory=slots_bytes(index, 4), read_threads=1
    )
    pool.preload([(2, 0), *((layer, e) for layer in range(3) for e in (1, 2, 3))])
    assert entered.wait(30)
    pool.move_quota(0, 1)  # would hang: no read ends before the gate opens
    assert list(pool.residency.quotas) == [3, 5, 4]
    assert len(pool._loads) == 10, "the two layers' own preloads are queued again"
    pool.check_invariants()
    gate.set()
    pool.settle()
    assert pool.resident_counts().tolist() == [3, 3, 4]
    pool.check_invariants()
    pool.close()


def test_hits_and_misses_by_tier_are_what_was_asked_for(tmp_path):
    """Preloads, and reads that fail, are no accesses of their own."""
    index = FakeIndex(tmp_path, FakeShape(num_layers=2, num_experts=12, top_k=2))
    reader = FaultyReader(index)
    pool, _ = open_pool(index, reader, expert_memory=slots_bytes(index, 4))
    pool.preload([(0, e) for e in range(4)])
    pool.settle()
    reader.faults[0, 9] = ["error", "error"]
    counts = np.zeros(12, dtype=np.int64)
    counts[[0, 5, 9]] = 1
    for misses in (2, 1):  # 9 is read in vain, then barred
        pool.begin_step()
        for _ in range(2):  # a step's second pass asks for nothing new
            for _ in pool.demand(0, counts, 2):
                pass
        stats = pool.end_step()
        assert (stats.demand_hits, stats.demand_misses) == (3 - misses, misses)
        assert (stats.host_misses, stats.disk_misses) == (0, misses)
    pool.close()
