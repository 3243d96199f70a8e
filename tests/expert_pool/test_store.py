import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_pool import file_reader
from expert_pool.file_reader import FileReader
from expert_pool.store import DEMAND, PRELOAD, ExpertStore, Load
from tests.expert_pool.fake_experts import FakeIndex, FakeShape

SIZE = 3 * 4096 + 1234


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("reader") / "data"
    content = np.random.default_rng(0).bytes(SIZE)
    path.write_bytes(content)
    return path, content


@settings(max_examples=60)
@given(direct=st.booleans(), offset=st.integers(0, SIZE), size=st.integers(0, SIZE), st_=st.data())
def test_any_range_reads_as_it_lies_on_disk(data_file, direct, offset, size, st_):
    path, content = data_file
    staging = st_.draw(st.sampled_from([4096, 8192, 4 * 1024**2]))
    reader = FileReader([path], direct=direct)
    reader._thread.staging = np.frombuffer(file_reader.mmap.mmap(-1, staging), dtype=np.uint8)
    into = np.full(size, 7, dtype=np.uint8)
    try:
        if offset + size <= SIZE:
            reader.read(0, offset, into)
            assert into.tobytes() == content[offset : offset + size]
        else:
            with pytest.raises(OSError, match="cut short"):
                reader.read(0, offset, into)
    finally:
        reader.close()


def test_a_file_system_without_direct_reads_is_read_through_the_cache(data_file, monkeypatch):
    path, content = data_file
    opened = []
    real_open = os.open

    def refuse_direct(file, flags, *args, **kwargs):
        opened.append(bool(flags & os.O_DIRECT))
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(file, flags, *args, **kwargs)

    monkeypatch.setattr(file_reader.os, "open", refuse_direct)
    reader = FileReader([path], direct=True)
    for _ in range(2):
        into = np.empty(100, dtype=np.uint8)
        reader.read(0, 17, into)
        assert into.tobytes() == content[17:117]
    reader.close()
    assert opened == [True, False]


def test_a_missing_file_and_an_io_error_are_not_taken_for_missing_direct_reads(tmp_path):
    reader = FileReader([tmp_path / "absent"], direct=True)
    with pytest.raises(FileNotFoundError):
        reader.read(0, 0, np.empty(10, dtype=np.uint8))


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("kind", ["gated", "biased"])
def test_records_land_in_slots_as_parameters(tmp_path, transformed, kind):
    index = FakeIndex(tmp_path, FakeShape(kind=kind, transformed=transformed))
    store = ExpertStore(index, FileReader(index.files), 2, lambda layer, expert: None)
    layer = index.layers[1]
    loads = [Load(1, e, torch.zeros(layer.slot_bytes, dtype=torch.uint8), DEMAND) for e in range(8)]
    for load in loads:
        store.submit(load)
    finished = []
    while len(finished) < len(loads):
        finished += store.finished(wait=True)
    assert store.in_flight == 0
    assert {load.expert for load in finished} == set(range(8))
    for load in loads:
        assert load.error is None
        assert (load.full_reads, load.record_bytes) == (1, index.record_bytes)
        assert load.digest is not None
        for param in layer.params:
            raw = load.slot[param.slot_offset : param.slot_offset + param.nbytes]
            value = raw.view(getattr(torch, param.dtype)).view(param.shape)
            assert torch.equal(value, index.weights[1][param.name][load.expert])
    store.close()


class GateReader:
    """Reads nothing, remembers the order, and waits at a gate before its first read ends."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.order: list[int] = []
        self.closed = False

    def read(self, file, offset, into):
        self.order.append(offset)
        self.entered.set()
        assert self.gate.wait(30)

    def close(self):
        self.closed = True


def test_demand_goes_before_preload_and_preloads_can_be_called_off(tmp_path):
    index = FakeIndex(tmp_path, FakeShape())
    pieces = len(index.layers[0].params)
    reader = GateReader()
    store = ExpertStore(index, reader, 1, None)
    slot = torch.zeros(index.layers[0].slot_bytes, dtype=torch.uint8)
    loads = {e: Load(0, e, slot, PRELOAD if e < 4 else DEMAND) for e in range(6)}
    store.submit(loads[0])
    assert reader.entered.wait(30)
    for expert in range(1, 6):
        store.submit(loads[expert])
    store.hurry(loads[3])
    assert store.call_off(loads[1])
    assert not store.call_off(loads[0]), "a read that has begun must be awaited"
    assert store.finished(wait=False) == []
    assert store.in_flight == 5
    reader.gate.set()
    finished = []
    while store.in_flight:
        finished += store.finished(wait=True)
    assert [load.expert for load in finished] == [0, 4, 5, 3, 2]
    experts = [(offset - 8) // index.record_bytes for offset in reader.order]
    assert experts == [e for e in (0, 4, 5, 3, 2) for _ in range(pieces)]
    assert all(load.digest is None for load in finished), "without a checksum source none is made"
    store.close()
    assert reader.closed


def test_a_reader_outlives_any_error(tmp_path):
    class Broken:
        def read(self, file, offset, into):
            raise RuntimeError("not a read error")

        def close(self):
            pass

    index = FakeIndex(tmp_path, FakeShape())
    store = ExpertStore(index, Broken(), 1, None)
    for expert in range(2):
        store.submit(Load(0, expert, torch.zeros(4096 * 9, dtype=torch.uint8), DEMAND))
        (load,) = store.finished(wait=True)
        assert isinstance(load.error, RuntimeError)
        assert (load.attempts, load.full_reads) == (1, 0), "only read errors are worth a retry"
    store.close()


def test_readers_do_not_take_torch_threads_from_the_process(tmp_path):
    before = torch.get_num_threads()
    index = FakeIndex(tmp_path, FakeShape())
    counts = []

    class Asking(GateReader):
        def read(self, file, offset, into):
            counts.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        store = ExpertStore(index, Asking(), 2, None)
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        store.submit(Load(0, 0, torch.zeros(4096 * 9, dtype=torch.uint8), DEMAND))
        store.finished(wait=True)
        store.close()
        assert set(counts) == {1}
        assert torch.get_num_threads() == 2
        assert later == [2]
    finally:
        torch.set_num_threads(before)
