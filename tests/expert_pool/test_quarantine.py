"""Reads that fail: one more try serves, two failures quarantine; nothing garbled is computed."""

import pytest
import torch

from expert_pool.residency import QUARANTINE_S
from expert_pool.tables import State
from tests.expert_pool.fake_experts import FakeIndex, FakeShape, FaultyReader, random_routing
from tests.expert_pool.test_pool import open_pool, slots_bytes

SHAPE = FakeShape(num_layers=1, num_experts=8, top_k=2)


@pytest.fixture
def opened(tmp_path):
    """A pool whose checksums are known, and its clock."""
    index = FakeIndex(tmp_path, SHAPE)
    pool, _ = open_pool(index)
    pool.preload([(0, e) for e in range(8)])
    pool.settle()
    pool.close()
    now = [0.0]
    reader = FaultyReader(index)
    pool, model = open_pool(
        index, reader, lambda: now[0], expert_memory=slots_bytes(index, 4), read_threads=2
    )
    yield pool, model, reader, now
    pool.close()


def run(pool, model, routed):
    pool.begin_step()
    out = model.layers[0](*routed)
    stats = pool.end_step()
    pool.check_invariants()
    return out, stats


@pytest.mark.parametrize("fault", ["flip", "error"])
def test_a_good_second_read_serves(opened, fault):
    pool, model, reader, _ = opened
    routed = random_routing(SHAPE, 6, 0)
    victim = int(routed[1][0, 0])
    reader.faults[0, victim] = [fault]
    out, stats = run(pool, model, routed)
    assert torch.equal(out, model.stock(0, *routed))
    assert stats.rereads == 1
    assert stats.failed_rows == ()
    reads = stats.demand_misses + (fault == "flip")
    assert stats.records_read == reads, "only whole reads count"
    assert stats.bytes_read == reads * pool.index.record_bytes


@pytest.mark.parametrize("faults", [["flip", "flip"], ["error", "error"], ["flip", "error"]])
def test_two_bad_reads_fail_the_rows_that_needed_them_and_no_other(opened, faults):
    pool, model, reader, now = opened
    routed = random_routing(SHAPE, 6, 0)
    victim = int(routed[1][0, 0])
    needed = (routed[1] == victim).any(dim=1)
    assert 0 < needed.sum() < 6
    reader.faults[0, victim] = list(faults)
    out, stats = run(pool, model, routed)
    stock = model.stock(0, *routed)
    assert torch.equal(out[~needed], stock[~needed]), "the others are not touched"
    hidden, chosen, weights = routed
    without = model.stock(0, hidden, chosen, weights.masked_fill(chosen == victim, 0))
    assert torch.equal(out[needed], without[needed]), "what could not be read adds nothing"
    assert stats.failed_rows == tuple(needed.nonzero().flatten().tolist())
    assert pool.residency.states.state[0, victim] == State.QUARANTINED

    # For some seconds the disk is not asked again, though it is whole by now.
    before = len(reader.reads)
    now[0] += QUARANTINE_S / 2
    _, stats = run(pool, model, routed)
    assert stats.failed_rows == tuple(needed.nonzero().flatten().tolist())
    assert stats.demand_hits + stats.demand_misses == len(set(routed[1].flatten().tolist()))
    assert (0, victim) not in reader.reads[before:]

    now[0] += QUARANTINE_S
    out, stats = run(pool, model, routed)
    assert torch.equal(out, stock)
    assert stats.failed_rows == ()
    assert pool.residency.states.state[0, victim] != State.QUARANTINED


def test_a_read_ahead_that_failed_fails_no_request(opened):
    """The disk had a bad moment while nobody needed the expert."""
    pool, model, reader, _ = opened
    routed = random_routing(SHAPE, 6, 0)
    victim = int(routed[1][0, 0])
    reader.faults[0, victim] = ["error", "error"]
    pool.preload([(0, victim)])
    pool.settle()
    assert pool.residency.states.state[0, victim] == State.QUARANTINED
    before = len(reader.reads)
    pool.preload([(0, victim)])
    assert len(reader.reads) == before, "a guess is not read again"
    out, stats = run(pool, model, routed)
    assert stats.failed_rows == ()
    assert torch.equal(out, model.stock(0, *routed))


def test_failed_rows_count_from_the_calls_first_row(opened):
    pool, model, reader, _ = opened
    routed = random_routing(SHAPE, 6, 0)
    victim = int(routed[1][3, 0])
    reader.faults[0, victim] = ["error", "error"]
    pool.begin_step()
    pool.row_offset = 100
    model.layers[0](*routed)
    rows = (routed[1] == victim).any(dim=1).nonzero().flatten().tolist()
    assert pool.end_step().failed_rows == tuple(100 + row for row in rows)


def test_all_experts_failing_gives_zeros_not_garbage(opened):
    pool, model, reader, _ = opened
    routed = random_routing(SHAPE, 3, 0)
    for expert in range(8):
        reader.faults[0, expert] = ["error", "error"]
    out, stats = run(pool, model, routed)
    assert (out == 0).all()
    assert stats.failed_rows == (0, 1, 2)
    assert stats.records_read == 0

    # The same while all of them are barred: nothing is awaited, and the step does not break off.
    out, stats = run(pool, model, routed)
    assert (out == 0).all()
    assert stats.failed_rows == (0, 1, 2)


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_file_that_vanishes_or_shrinks_fails_its_rows(tmp_path, damage):
    index = FakeIndex(tmp_path, SHAPE)
    if damage == "removed":
        index.files[0].unlink()
    else:
        with index.files[0].open("r+b") as stream:
            stream.truncate(8 + 3 * index.record_bytes + 100)
    pool, model = open_pool(index)
    routed = random_routing(SHAPE, 6, 0)
    out, stats = run(pool, model, routed)
    lost = (routed[1] >= (0 if damage == "removed" else 3)).any(dim=1)
    assert lost.any()
    assert stats.failed_rows == tuple(lost.nonzero().flatten().tolist())
    assert torch.equal(out[~lost], model.stock(0, *routed)[~lost])
    pool.close()
