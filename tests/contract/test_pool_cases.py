"""Public bug reports against other engines with expert caches, as small inputs for our pool."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.errors import BudgetError
from expert_pool.experts_forward import rows_a_chunk
from expert_pool.residency import QUARANTINE_S
from expert_pool.tables import ResidencyViolation, State
from tests.expert_pool.fake_experts import (
    KINDS,
    FakeIndex,
    FakeModel,
    FakeShape,
    FaultyReader,
    random_routing,
)
from tests.expert_pool.test_pool import open_pool, slots_bytes

SHAPE = FakeShape(num_layers=2, num_experts=10, top_k=3)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return FakeIndex(tmp_path_factory.mktemp("cases"), SHAPE)


def run_log(pool, model: FakeModel, preload: bool = False) -> list[torch.Tensor]:
    """A fixed log of steps: prompts, single tokens, a batch."""
    outputs = []
    for step, rows in enumerate((12, 1, 1, 30, 2, 5, 1)):
        pool.begin_step()
        for layer in range(SHAPE.num_layers):
            if preload:
                pool.preload([(1 - layer, (3 * step + e) % 10) for e in range(3)])
            routed = random_routing(SHAPE, rows, 2 * step + layer)
            outputs.append(model.layers[layer](*routed))
        pool.end_step()
        pool.check_invariants()
    return outputs


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("slots", [3, 4, 10])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("preload", [False, True])
def test_m1_answers_are_bitwise_equal_wherever_experts_lie(index, policy, slots, warm, preload):
    """MoE-Infinity#16, KTransformers#1565."""
    everything, model = open_pool(index)
    expected = run_log(everything, model)
    everything.close()
    pool, model = open_pool(index, expert_memory=slots_bytes(index, slots), policy=policy)
    if warm:
        run_log(pool, model, preload)
    for ours, right in zip(run_log(pool, model, preload), expected, strict=True):
        assert torch.equal(ours, right)
    pool.close()


def test_m2_an_expert_that_is_not_resident_is_never_executed(index, monkeypatch):
    """MoE-Infinity#42: a slot was given to another expert while a step ran on it."""
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 3))
    routed = random_routing(SHAPE, 8, 1)
    module = model.layers[0]
    seen = []

    def check_every_slot_in_use(gate_up):
        states, addresses = pool.residency.states, pool.residency.addresses
        pinned = np.flatnonzero(states.pins[0])
        assert pinned.size > 0
        assert (states.state[0][pinned] == State.RESIDENT).all()
        for expert in pinned:
            # The public calls that move experts leave it alone, and forcing them raises.
            pool.evict([(0, int(expert))])
            with pytest.raises(ResidencyViolation, match="pin count 0"):
                states.evict(0, int(expert))
            slot = int(addresses.lookup(0, np.array([expert]))[0])
            for name, view in pool.residency.arena(0).views.items():
                assert torch.equal(view[slot], index.weights[0][name][expert])
            seen.append(int(expert))
        return type(module)._apply_gate(module, gate_up)

    right = model.stock(0, *routed)
    monkeypatch.setattr(module, "_apply_gate", check_every_slot_in_use, raising=False)
    pool.begin_step()
    assert torch.equal(module(*routed), right)
    pool.end_step()
    assert set(seen) == set(routed[1].flatten().tolist())
    with pytest.raises(ResidencyViolation, match="UNLOADED"):
        missing = np.flatnonzero(pool.residency.states.state[0] == State.UNLOADED)
        pool.residency.states.pin(0, missing[:1])
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", ["nan", "inf", "-inf", "negative index", "index = E", "huge"])
def test_m8_a_bad_row_fails_alone(tmp_path, kind, poison):
    """vLLM#39391, sglang#30079, colibri#563: NaN or infinite gates, padded rows."""
    shape = FakeShape(num_layers=1, num_experts=10, top_k=3, kind=kind)
    index = FakeIndex(tmp_path, shape)
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 4))
    hidden, experts, weights = random_routing(shape, 9, 2)
    right = model.stock(0, hidden, experts, weights)
    bad = (2, 8)
    for row in bad:  # the last one as a row that pads the batch with what memory held
        hidden[row] = float("nan")
        if poison in ("nan", "inf", "-inf"):
            weights[row, 1] = float(poison)
        else:
            experts[row, 1] = {"negative index": -1, "index = E": 10, "huge": 2**40}[poison]
    pool.begin_step()
    out = model.layers[0](hidden, experts, weights)
    stats = pool.end_step()
    pool.check_invariants()
    assert stats.bad_rows == bad
    assert stats.failed_rows == ()
    good = [row for row in range(9) if row not in bad]
    assert (out[list(bad)] == 0).all()
    if poison in ("nan", "inf", "-inf"):
        # Every expert saw as many rows as without the poison: not a bit differs.
        assert torch.equal(out[good], right[good])
        assert stats.routed_pairs == 27
    else:
        torch.testing.assert_close(out[good], right[good], rtol=1e-5, atol=1e-5)
        assert stats.routed_pairs == 27 - len(bad)
    pool.close()


def test_m8_zeroed_padding_is_no_fault(index):
    pool, model = open_pool(index)
    hidden, experts, weights = random_routing(SHAPE, 6, 2)
    hidden[4:], weights[4:], experts[4:] = 0, 0, 0
    pool.begin_step()
    out = model.layers[0](hidden, experts, weights)
    assert pool.end_step().bad_rows == ()
    assert (out[4:] == 0).all()
    assert torch.equal(out, model.stock(0, hidden, experts, weights))
    pool.close()


def test_m8_many_large_weights_are_not_taken_for_infinity(index):
    pool, model = open_pool(index)
    hidden, experts, weights = random_routing(SHAPE, 6, 2)
    pool.begin_step()
    model.layers[0](hidden, experts, torch.full_like(weights, 3e38))
    assert pool.end_step().bad_rows == ()
    pool.close()


@pytest.mark.parametrize("slots", [3, 4, 10])
def test_m11_works_down_to_top_k_slots(index, slots):
    """KTransformers#1928, #1835, openvino#37737."""
    pool, model = open_pool(index, expert_memory=slots_bytes(index, slots))
    assert pool.residency.quotas == [slots, slots]
    routed = random_routing(SHAPE, 20, 1)
    pool.begin_step()
    assert torch.equal(model.layers[1](*routed), model.stock(1, *routed))
    pool.end_step()
    pool.close()


@pytest.mark.parametrize("memory", ["0%", 0, "less"])
def test_m11_below_that_names_need_and_have(index, memory):
    need = slots_bytes(index, 3)
    have = need - 1 if memory == "less" else 0
    with pytest.raises(BudgetError, match=f"need at least {need} bytes.*have {have} bytes"):
        open_pool(index, expert_memory=have if memory == "less" else memory)


def test_m11_hundred_percent_is_everything(index):
    for memory in ("100%", "all", 2**30):
        pool, _ = open_pool(index, expert_memory=memory)
        assert pool.residency.quotas == [10, 10]
        pool.close()


class PeakBytes(TorchDispatchMode):
    """Most bytes that tensors made inside of it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in args:  # whatever comes in without having been made here
            if isinstance(tensor, torch.Tensor):
                self._seen.add(tensor.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(tensor, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, storage: int, nbytes: int) -> None:
        self._seen.discard(storage)
        self.now -= nbytes


@pytest.mark.parametrize("slots", [3, 10])
def test_m13_scratch_of_a_long_prefill_stays_within_its_budget(index, slots):
    """KTransformers#1676: 8k tokens at once."""
    budget = 2 * 1024**2
    pool, model = open_pool(index, expert_memory=slots_bytes(index, slots), scratch_bytes=budget)
    rows = 8192
    routed = random_routing(SHAPE, rows, 1)
    assert rows_a_chunk(pool, 0, *routed) < rows / 4
    pool.begin_step()
    with PeakBytes() as memory:
        out = model.layers[0](*routed)
    stats = pool.end_step()
    output_bytes = out.numel() * out.element_size()
    assert budget / 8 < memory.peak - output_bytes <= budget
    assert stats.routed_pairs == rows * 3
    torch.testing.assert_close(out, model.stock(0, *routed), rtol=1e-4, atol=1e-4)
    pool.close()


def test_m13_row_chunks_depend_on_the_number_of_rows_alone(index):
    outputs = []
    for slots, policy in ((3, "lru"), (10, "lfu"), (5, "lfu")):
        pool, model = open_pool(
            index,
            expert_memory=slots_bytes(index, slots),
            scratch_bytes=2**20,
            policy=policy,
        )
        pool.begin_step()
        outputs.append(model.layers[0](*random_routing(SHAPE, 3000, 4)))
        stats = pool.end_step()
        assert stats.demand_hits + stats.demand_misses == 10, "chunks are no further accesses"
        pool.close()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_m18_a_flipped_byte_is_found_and_nothing_garbled_is_served(tmp_path):
    """Silent disk errors in the field: one byte of an expert's record turns over."""
    shape = FakeShape(num_layers=1, num_experts=10, top_k=3)
    index = FakeIndex(tmp_path, shape)
    pool, _ = open_pool(index)
    pool.preload([(0, e) for e in range(10)])
    pool.settle()
    pool.close()
    routed = random_routing(shape, 12, 0)
    victim = int(routed[1][0, 0])
    needed = (routed[1] == victim).any(dim=1)
    now = [0.0]

    # On its way from the disk: read again, served.
    reader = FaultyReader(index)
    reader.faults[0, victim] = ["flip"]
    pool, model = open_pool(index, reader)
    pool.begin_step()
    assert torch.equal(model.layers[0](*routed), model.stock(0, *routed))
    assert pool.end_step().rereads == 1
    pool.close()

    # On the disk itself, for every byte position that a record could turn at.
    for at in (0, index.record_bytes // 2, index.record_bytes - 1):
        offset = 8 + victim * index.record_bytes + at
        flip_byte(index.files[0], offset)
        pool, model = open_pool(index, clock=lambda: now[0])
        pool.begin_step()
        out = model.layers[0](*routed)
        stats = pool.end_step()
        assert stats.failed_rows == tuple(needed.nonzero().flatten().tolist())
        assert torch.equal(out[~needed], model.stock(0, *routed)[~needed])
        assert pool.residency.states.state[0, victim] == State.QUARANTINED
        # Restored on disk, it serves again without a restart.
        flip_byte(index.files[0], offset)
        now[0] += QUARANTINE_S + 1
        pool.begin_step()
        assert torch.equal(model.layers[0](*routed), model.stock(0, *routed))
        assert pool.end_step().failed_rows == ()
        pool.close()


def flip_byte(path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))


def test_m27_recorded_loads_sum_to_tokens_times_k_times_layers(index):
    """SGLang#12823: a batch of 64."""
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 4))
    expected = np.zeros((2, 10), dtype=np.int64)
    for step in range(3):
        pool.begin_step()
        for layer in range(2):
            routed = random_routing(SHAPE, 64, 5 * step + layer)
            expected[layer] += np.bincount(routed[1].flatten(), minlength=10)
            model.layers[layer](*routed)
        assert pool.end_step().routed_pairs == 64 * 3 * 2
    assert np.array_equal(pool.loads, expected)
    assert pool.loads.sum() == 3 * 64 * 3 * 2
    pool.close()
