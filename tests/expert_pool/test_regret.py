"""The optimum beside the live cache, worked out off the step's thread."""

import threading
import time

import numpy as np

from expert_pool import regret
from expert_pool.oracle import belady_misses
from expert_pool.pool import ExpertPool
from expert_pool.regret import RegretMeter
from expert_pool.settings import PoolSettings
from tests.expert_pool.fake_experts import FakeIndex, FakeShape
from tests.synthetic_trace import synthetic_trace


def wait_for(meter, windows):
    done, until = np.zeros(2, dtype=int), time.monotonic() + 20
    while windows and time.monotonic() < until:
        found = meter.take()
        windows -= found != (0, 0)
        done += found
        time.sleep(0.002)
    return done.tolist()


def test_at_most_so_many_layers_evenly_spaced():
    assert RegretMeter([8] * 26, 4).layers == {0, 7, 14, 21}
    assert RegretMeter([8] * 3, 4).layers == {0, 1, 2}


def test_the_optimum_is_that_of_the_oracle_and_another_thread_finds_it(monkeypatch):
    monkeypatch.setattr(regret, "WINDOW_STEPS", 30)
    trace = synthetic_trace(tokens=30, layers=1, experts=16, top_k=3)
    before = sum(thread.name == "regret" for thread in threading.enumerate())
    meter = RegretMeter([16], 4)
    assert meter._thread is None, "no thread before the first window"
    for step in range(30):
        assert meter.take() == (0, 0)
        meter.record(0, np.arange(5), 6, trace.demands[step, 0], 2)
    held = np.zeros((1, 16), dtype=bool)
    held[0, :5] = True
    best = int(belady_misses(trace.demands, 16, 6, held).sum())
    assert wait_for(meter, 1) == [best, 60]
    meter.close()
    assert sum(thread.name == "regret" for thread in threading.enumerate()) <= before


def test_a_pool_tells_its_regret_in_the_step_statistics(tmp_path, monkeypatch):
    monkeypatch.setattr(regret, "WINDOW_STEPS", 10)
    shape = FakeShape(num_layers=2, num_experts=16, top_k=3, hidden=16, width=8)
    index = FakeIndex(tmp_path, shape)
    memory = 6 * sum(layer.slot_bytes for layer in index.layers)
    settings = PoolSettings(expert_memory=memory, prefetch="off", policy="lru")
    pool = ExpertPool(index, settings)
    trace = synthetic_trace(tokens=40, layers=2, experts=16, top_k=3)
    misses = compared = optimum = 0
    for step in range(1000):
        pool.begin_step()
        if step < 40:
            for layer in range(2):
                counts = np.bincount(trace.demands[step, layer], minlength=16)
                for _ in pool.demand(layer, counts, 1):
                    pass
        stats = pool.end_step()
        misses += stats.demand_misses
        compared += stats.compared_misses
        optimum += stats.optimum_misses
        if step >= 40:
            time.sleep(0.01)
            if compared == misses:
                break
    pool.close()
    assert compared == misses
    assert 0 < optimum < misses


def test_windows_are_dropped_rather_than_kept_for_ever(monkeypatch):
    monkeypatch.setattr(regret, "WINDOW_STEPS", 1)
    monkeypatch.setattr(regret, "_PAUSE_S", 0.2)
    meter = RegretMeter([8], 1)
    began = time.monotonic()
    for _ in range(100):
        meter.record(0, np.arange(2), 2, np.array([3]), 1)
    assert time.monotonic() - began < 0.2
    assert meter._windows.qsize() <= regret.MOST_WAITING
    meter.close()
