"""Prefetch in the live pool on a virtual clock, and the Prefetcher's rules by themselves."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_pool.payoff import PROBE_PASSES
from expert_pool.prefetch import ALLOWANCE, MAX_DISTANCE, Choice, Prefetcher
from expert_pool.store import DEMAND, PREFETCH
from expert_pool.tables import State
from tests.expert_pool.fake_experts import FakeIndex, FakeShape, random_routing
from tests.expert_pool.test_overlap import SlowReader
from tests.expert_pool.test_pool import open_pool, slots_bytes
from tests.expert_pool.virtual_disk import VirtualPool

SHAPE = FakeShape(num_layers=6, num_experts=32, top_k=4, hidden=8, width=8)
SLOTS = 14


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return FakeIndex(tmp_path_factory.mktemp("prefetch"), SHAPE)


def foreseeable(steps, seed=0):
    """Each step is of one of eight kinds at random; its experts in all layers follow from that."""
    draw = np.random.default_rng(seed)
    of_kind = np.stack([draw.permutation(32).reshape(8, 4) for _ in range(SHAPE.num_layers)])
    return of_kind[:, draw.integers(0, 8, steps)].transpose(1, 0, 2)


def random_experts(steps, seed=0):
    draw = np.random.default_rng(seed)
    rows = [draw.permutation(32)[:4] for _ in range(steps * SHAPE.num_layers)]
    return np.stack(rows).reshape(steps, SHAPE.num_layers, 4)


def open_virtual(monkeypatch, index, read_s=0.5e-3, compute_s=0.4e-3, prefetch="auto", **more):
    more.setdefault("policy", "lru")
    return VirtualPool(monkeypatch, index, read_s, compute_s, prefetch=prefetch,
                       expert_memory=slots_bytes(index, SLOTS), **more)  # fmt: skip


def test_it_hides_stall_that_can_be_foreseen(monkeypatch, index):
    demands = foreseeable(400)
    without = open_virtual(monkeypatch, index, prefetch="off")
    without_s = without.run(demands)
    ahead = open_virtual(monkeypatch, index)
    with_s = ahead.run(demands)
    assert ahead.stats[-1].prefetch.state == "on"
    assert with_s < 0.95 * without_s
    assert ahead.total("stall_s") < 0.75 * without.total("stall_s")
    # What it says it saved is about what it did save.
    reckoned_s = ahead.prefetched("hidden_s") - ahead.prefetched("harm_s")
    assert reckoned_s == pytest.approx(without_s - with_s, rel=0.4)
    assert ahead.total("bytes_read") <= 1.15 * without.total("bytes_read")
    assert ahead.prefetched("used") > 5 * ahead.prefetched("wasted")
    assert ahead.stats[-1].prefetch.net_gain > 0.05
    recalls = [stats.prefetch.recall for stats in ahead.stats if stats.prefetch.recall]
    assert recalls[-1]["transitions"] > 0.95
    ahead.pool.settle()
    ahead.pool.check_invariants()


def test_the_same_run_gives_the_same_numbers(monkeypatch, index):
    demands = foreseeable(120, seed=3)
    first = open_virtual(monkeypatch, index)
    first_s = first.run(demands)
    second = open_virtual(monkeypatch, index)
    assert second.run(demands) == first_s
    for one, other in zip(first.stats, second.stats, strict=True):
        assert (one.prefetch, one.stall_s) == (other.prefetch, other.stall_s)


@pytest.mark.parametrize(
    ("name", "read_s", "compute_s", "demands"),
    [
        ("nothing to foresee", 1e-3, 0.2e-3, random_experts),
        ("a fast disk: reads are hidden by computing anyway", 0.05e-3, 0.4e-3, foreseeable),
        ("a slow disk that is always busy", 20e-3, 0.05e-3, random_experts),
    ],
)
def test_it_stands_down_where_it_does_not_pay(monkeypatch, index, name, read_s, compute_s, demands):
    steps = 3 * PROBE_PASSES // SHAPE.num_layers
    without = open_virtual(monkeypatch, index, read_s, compute_s, prefetch="off")
    without_s = without.run(demands(steps))
    ahead = open_virtual(monkeypatch, index, read_s, compute_s)
    with_s = ahead.run(demands(steps))
    assert "off" in {stats.prefetch.state for stats in ahead.stats[-steps // 3 :]}
    assert ahead.total("bytes_read") <= 1.15 * without.total("bytes_read")
    assert with_s <= 1.02 * without_s


def test_it_probes_again_and_comes_back_when_the_disk_gets_slow(monkeypatch, index):
    ahead = open_virtual(monkeypatch, index, 0.05e-3)
    ahead.run(foreseeable(250))
    assert ahead.stats[-1].prefetch.state == "off"
    begun = ahead.prefetched("begun")
    ahead.store.read_s = 0.5e-3
    ahead.run(foreseeable(1200))
    assert ahead.stats[-1].prefetch.state == "on"
    assert ahead.prefetched("begun") > begun + 1000


def test_off_never_reads_ahead_and_on_never_stands_down(monkeypatch, index):
    never = open_virtual(monkeypatch, index, prefetch="off")
    never.run(foreseeable(100))
    assert never.pool.read_ahead is None
    assert {priority for _, _, priority in never.store.order} == {DEMAND}
    assert never.stats[-1].prefetch.state == "off"
    always = open_virtual(monkeypatch, index, 0.05e-3, prefetch="on")
    always.run(foreseeable(300))
    assert {stats.prefetch.state for stats in always.stats} == {"on"}
    assert always.prefetched("begun") > 0


def test_a_pool_with_a_slot_for_every_expert_has_no_prefetcher(index):
    pool, _ = open_pool(index, prefetch="on")
    assert pool.read_ahead is None
    pool.close()


def test_it_reads_farther_ahead_where_reads_take_longer(monkeypatch, index):
    near = open_virtual(monkeypatch, index, 0.5e-3, 0.4e-3, prefetch="on")
    near.run(foreseeable(200))
    assert near.stats[-1].prefetch.distance_layers == 1
    far = open_virtual(monkeypatch, index, 5e-3, 0.4e-3, readers=4, prefetch="on")
    far.run(foreseeable(200))
    assert 2 <= far.stats[-1].prefetch.distance_layers <= MAX_DISTANCE


def test_demand_goes_first_and_two_layers_worth_is_the_most(monkeypatch, index):
    ahead = open_virtual(monkeypatch, index, 3e-3, 0.4e-3, prefetch="on")
    prefetcher = ahead.pool.read_ahead.prefetcher
    most = []
    real = prefetcher.began

    def began(layer, choice):
        real(layer, choice)
        most.append((prefetcher.num_under_way, len(prefetcher._under_way[layer])))

    monkeypatch.setattr(prefetcher, "began", began)
    submit, queued = ahead.store.submit, []
    monkeypatch.setattr(ahead.store, "submit", lambda load: (queued.append(load), submit(load)))
    ahead.run(foreseeable(200))
    assert max(total for total, _ in most) <= 2 * SHAPE.top_k
    assert max(of_layer for _, of_layer in most) <= SHAPE.top_k
    # No read ahead began while one that was asked for waited.
    for load in queued:
        if load.priority == DEMAND:
            waited = [
                other for other in queued
                if other.priority == PREFETCH and other.taken and other.began_s < load.began_s
                and other.began_s > load_time(load, ahead)
            ]  # fmt: skip
            assert not waited


def load_time(load, ahead):
    """The earliest time from which a demanded load can be known to have waited."""
    return load.began_s - ahead.store.read_s * 0.5 if load.began_s else float("inf")


def test_mistaken_reads_that_have_not_begun_are_called_off(monkeypatch, index):
    ahead = open_virtual(monkeypatch, index, 1e-3, 0.3e-3, prefetch="on")
    ahead.run(foreseeable(100))
    before = ahead.prefetched("called_off")
    prefetcher = ahead.pool.read_ahead.prefetcher
    monkeypatch.setattr(prefetcher, "_least_chance", lambda: -1.0)
    monkeypatch.setattr(prefetcher, "_room", lambda layer: 4)
    monkeypatch.setattr(
        prefetcher.forecaster, "_scores", lambda *_: np.random.default_rng(0).random(32)
    )
    ahead.run(foreseeable(30, seed=9))
    assert ahead.prefetched("called_off") > before
    ahead.pool.settle()
    ahead.pool.check_invariants()


def test_waste_stays_within_its_allowance_whatever_is_foretold(monkeypatch, index):
    draw = np.random.default_rng(1)
    ahead = open_virtual(monkeypatch, index, 0.2e-3, 0.4e-3, prefetch="on")
    forecaster = ahead.pool.read_ahead.prefetcher.forecaster
    monkeypatch.setattr(forecaster, "_scores", lambda *_: draw.random(32))
    monkeypatch.setattr(
        "expert_pool.forecast._rates", lambda asked, judged: np.full(32, 0.9, np.float32)
    )
    ahead.run(random_experts(300))
    wasted, read = ahead.prefetched("wasted_bytes"), ahead.total("bytes_read")
    assert wasted > 0
    assert wasted <= ALLOWANCE * (read - wasted)


def test_a_steps_own_experts_and_better_ones_keep_their_slots(monkeypatch, index):
    """Whoever makes room is not pinned and worth less than who comes."""
    ahead = open_virtual(monkeypatch, index, prefetch="on", policy="lfu")
    prefetcher, states = ahead.pool.read_ahead.prefetcher, ahead.pool.residency.states
    policy, placed = ahead.pool.residency.policy, []
    real = prefetcher._place

    def place(forecast, places, num_free, leavers, worth):
        chosen = real(forecast, places, num_free, leavers, worth)
        chance = dict(zip(forecast.candidates.tolist(), forecast.chances.tolist(), strict=True))
        for choice in chosen:
            assert states.pins.sum(axis=1).astype(bool).sum() <= 1, "only the present layer's"
            if choice.victim is not None:
                stays = (1 - forecast.likely[choice.victim]) * 0.9 * worth()[choice.victim]
                comes = (1 - chance[choice.expert]) * 0.9 * worth()[choice.expert]
                placed.append(choice)
                assert (chance[choice.expert] + comes) > forecast.likely[choice.victim] + stays
        return chosen

    monkeypatch.setattr(prefetcher, "_place", place)
    ahead.run(foreseeable(150))
    assert placed
    assert policy is ahead.pool.residency.policy


def test_outputs_are_bitwise_the_same_with_prefetch(tmp_path):
    shape = FakeShape(num_layers=3, num_experts=16, top_k=3)
    index = FakeIndex(tmp_path, shape)
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 6), prefetch="on")
    prefetcher = pool.read_ahead.prefetcher
    prefetcher._least_chance = lambda: -1.0
    for step in range(60):
        pool.begin_step()
        for layer in range(3):
            routed = random_routing(shape, 1 + step % 3, step % 5)
            assert torch.equal(model.layers[layer](*routed), model.stock(layer, *routed))
        pool.end_step()
    pool.settle()
    pool.check_invariants()
    pool.close()


def test_it_hides_stall_with_real_threads(tmp_path, monkeypatch):
    """Sleeps for disk and computing, as in test_overlap; the best of a few, on a busy machine."""
    shape = FakeShape(num_layers=4, num_experts=12, top_k=2)
    index = FakeIndex(tmp_path, shape)
    # Layers agree on a pair of experts, drawn anew for each step.
    draw = np.random.default_rng(0)
    pairs = [draw.permutation(6)[0] for _ in range(40)]

    def stall_s(prefetch):
        reader = SlowReader(index, 0.0)
        pool, model = open_pool(
            index, reader, expert_memory=slots_bytes(index, 6), read_threads=2, prefetch=prefetch
        )
        if pool.read_ahead is not None:
            forecaster = pool.read_ahead.prefetcher.forecaster
            for step in range(60):  # what it would have learned
                for layer in range(4):
                    asked = np.array([2 * (step % 6), 2 * (step % 6) + 1])
                    forecaster.learn(layer, asked, np.ones(2, np.int64), 1)
                    forecaster._judged_missing[:, 1], forecaster._judged_here[:, 1] = 100, 100
                    forecaster._asked_missing[:, 1, :2] = 100
            forecaster._best = [1] * len(forecaster._best)
        monkeypatch.setattr("expert_pool.forecast._ALL_SOURCES_EVERY", 10**9)
        reader.read_s = 0.004
        total = 0.0
        for step, pair in enumerate(pairs):
            pool.begin_step()
            for layer in range(4):
                chosen = torch.tensor([[2 * pair, 2 * pair + 1]])
                hidden, weights = torch.randn(1, 64), torch.full((1, 2), 0.5)
                assert model.layers[layer](hidden, chosen, weights).isfinite().all()
                time.sleep(0.012)  # the layer's attention
            total += pool.end_step().stall_s * (step > 5)
        pool.settle()
        pool.check_invariants()
        pool.close()
        return total

    found = []
    for _ in range(4):
        found.append((stall_s("off"), stall_s("on")))
        if found[-1][1] < 0.7 * found[-1][0]:
            return
    raise AssertionError(f"stall without and with prefetch: {found}")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 6),
    num_free=st.integers(0, 4),
    residents=st.integers(0, 12),
)
def test_choices_are_missing_experts_once_each_and_victims_may_leave(
    seed, width, num_free, residents
):
    draw = np.random.default_rng(seed)
    now = [0.0]
    prefetcher = Prefetcher([16, 16, 12], [width] * 3, [100] * 3, lambda: now[0], always=True)
    prefetcher.forecaster._judged_missing += 100
    prefetcher.forecaster._judged_here += 100
    prefetcher.forecaster._asked_missing += (
        draw.random(prefetcher.forecaster._judged_here.shape) * 100
    )
    prefetcher._allowance = 100 * draw.integers(0, 10)
    prefetcher._stall_share = 0.0
    states = np.zeros((3, 16), np.int8)
    here = draw.permutation(12)[:residents]
    states[2, here] = State.RESIDENT
    loading = draw.permutation(np.setdiff1d(np.arange(12), here))[:2]
    states[2, loading] = State.LOADING
    may_leave = np.sort(here[: residents // 2])
    prefetcher.begin_step()
    prefetcher.demanded(1, np.arange(width), np.ones(width, np.int64), 1, states[1])
    assert prefetcher.target(1) == 2
    chosen = prefetcher.choose(
        2, states[2], num_free, lambda n: may_leave[:n], lambda: draw.random(16)
    )
    experts = [choice.expert for choice in chosen]
    victims = [choice.victim for choice in chosen if choice.victim is not None]
    assert len(set(experts)) == len(experts) <= min(width, prefetcher._allowance // 100)
    assert all(states[2, e] == State.UNLOADED and e < 12 for e in experts)
    assert set(victims) <= set(may_leave.tolist())
    assert len(set(victims)) == len(victims)
    assert len(chosen) - len(victims) <= num_free
    for choice in chosen:
        prefetcher.began(2, choice)
        states[2, choice.expert] = State.LOADING
    assert prefetcher.check(states)
    assert prefetcher.target(1) is None, "asked once a step"


def test_books_by_hand():
    now = [0.0]
    book = Prefetcher([4, 4], [1, 1], [10, 10], lambda: now[0])
    states = np.zeros(4, np.int8)
    one = np.ones(1, np.int64)
    book.began(1, Choice(0, None))
    book.began(1, Choice(1, 3))
    book.began(1, Choice(2, None))
    for expert in (0, 1, 2):
        states[expert] = State.LOADING
    book.came(1, 0, 10)
    states[0] = State.RESIDENT
    # 0 has come and is used; 1 and 2 are still on their way, in vain; 3 should not have left.
    assert book.demanded(1, np.array([0, 3]), np.ones(2, np.int64), 1, states) == [1, 2]
    book.called_off(1, 2)
    states[2] = State.UNLOADED
    book.came(1, 1, 10)
    states[1] = State.RESIDENT
    stats = book.end_step(0.0)
    assert (stats.begun, stats.used, stats.called_off, stats.regretted) == (3, 1, 1, 1)
    assert (stats.used_bytes, stats.wasted, stats.under_way) == (10, 0, 0)
    states[1] = State.UNLOADED
    book.demanded(1, np.array([0]), one, 1, states)
    stats = book.end_step(0.0)
    assert (stats.wasted, stats.wasted_bytes) == (1, 10)
    # One that failed was neither of use nor in vain.
    book.began(0, Choice(2, None))
    book.failed(0, 2)
    book.demanded(0, np.array([2]), one, 1, states)
    stats = book.end_step(0.0)
    assert (stats.begun, stats.used, stats.wasted) == (1, 0, 0)


def test_preloads_are_not_counted_as_prefetched(index):
    book = Prefetcher([4, 4], [1, 1], [10, 10], lambda: 0.0)
    states = np.zeros(4, np.int8)
    states[[0, 1]] = State.LOADING
    book.began(1, Choice(0, None))
    book.demanded(1, np.array([0, 1, 2]), np.ones(3, np.int64), 1, states)
    assert book._useful == (1, 2, 3), "1 is a preload"
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, SLOTS), prefetch="on")
    allowance = pool.read_ahead.prefetcher._allowance
    pool.preload([(0, e) for e in range(SLOTS)])
    pool.settle()
    assert pool.read_ahead.prefetcher._allowance == allowance
    pool.close()
