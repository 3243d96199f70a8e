"""The model of step times on machines whose coefficients are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.expert_demand import ExpertDemand
from engine.step_cost import StepCost, StepFeatures

MACHINE = np.array([4e-3, 5e-4, 1e-4, 2e-5, 6e-4, 4e-7])
NAMES = ("step", "decode_token", "prefill_token", "expert", "missing_expert", "kv_token")


def steps(count: int, seed: int = 0):
    """What a server's steps do: batches that come and go, prompts now and then, some misses."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        decode = int(draw.integers(0, 33))
        prefill = int(draw.integers(16, 512)) if draw.random() < 0.3 or not decode else 0
        experts = 1600 * (1 - 0.9 ** (decode + prefill)) * draw.uniform(0.8, 1.0)
        missing = float(draw.integers(0, 40))
        yield StepFeatures(decode, prefill, experts, missing, decode * draw.uniform(50, 3000))


def feed(cost: StepCost, machine=MACHINE, count=200, seed=0, noise=0.02, pauses=0.0) -> StepCost:
    draw = np.random.default_rng(seed + 1)
    for features in steps(count, seed):
        took_s = float(machine @ np.array((1.0, *features)))
        took_s *= math.exp(noise * draw.standard_normal())
        cost.learn(features, took_s * (20.0 if draw.random() < pauses else 1.0))
    return cost


@pytest.mark.parametrize("seed", range(4))
def test_it_learns_a_machine_in_200_steps(seed: int) -> None:
    cost = feed(StepCost(), seed=seed)
    for name, true in zip(NAMES, MACHINE, strict=True):
        assert cost.coefficients[name] == pytest.approx(true, rel=0.1), name
    assert cost.error < 0.04


def test_a_paused_machine_teaches_nothing() -> None:
    cost = feed(StepCost(), pauses=0.04)
    for name, true in zip(NAMES, MACHINE, strict=True):
        assert cost.coefficients[name] == pytest.approx(true, rel=0.15), name


@pytest.mark.parametrize("factor", [0.3, 1.3, 3.0])
def test_it_learns_again_when_the_machine_changes(factor: float) -> None:
    cost = feed(StepCost())
    feed(cost, factor * MACHINE, seed=5)
    for features in steps(20, seed=9):
        true_s = float(factor * MACHINE @ np.array((1.0, *features)))
        assert cost.predict_s(features) == pytest.approx(true_s, rel=0.1)
    assert cost.error < 0.1


def test_misses_that_become_dearer_are_noticed_alone() -> None:
    cost = feed(StepCost())
    dearer = MACHINE * np.array([1, 1, 1, 1, 3, 1])
    feed(cost, dearer, seed=6)
    assert cost.coefficients["missing_expert"] == pytest.approx(3 * MACHINE[4], rel=0.1)
    assert cost.coefficients["prefill_token"] == pytest.approx(MACHINE[2], rel=0.15)


def test_slow_first_steps_are_forgotten() -> None:
    cost = StepCost()
    for features in steps(3, seed=3):
        cost.learn(features, 5.0)
    assert not cost.known
    feed(cost, count=40)
    assert cost.known
    for features in steps(20, seed=9):
        true_s = float(MACHINE @ np.array((1.0, *features)))
        assert cost.predict_s(features) == pytest.approx(true_s, rel=0.25)


def test_a_few_alike_steps_are_predicted_and_keep_what_was_known() -> None:
    cost = feed(StepCost())
    alike = StepFeatures(4, 0, 500.0, 0, 2000)
    took_s = float(MACHINE @ np.array((1.0, *alike)))
    for _ in range(2000):
        cost.learn(alike, took_s)
    assert cost.predict_s(alike) == pytest.approx(took_s, rel=0.01)
    assert cost.coefficients["prefill_token"] == pytest.approx(MACHINE[2], rel=0.2)
    assert cost.coefficients["missing_expert"] == pytest.approx(MACHINE[4], rel=0.2)


def test_what_is_no_time_is_left_out() -> None:
    cost = feed(StepCost())
    before = cost.coefficients
    for took_s in (0.0, 1e-300, -1.0, math.nan, math.inf):
        cost.learn(StepFeatures(1, 0, 1, 0, 1), took_s)
    cost.learn(StepFeatures(math.nan, 0, 1, 0, 1), 0.1)
    assert cost.coefficients == before


@settings(max_examples=60, deadline=None)
@given(
    history=st.lists(
        st.tuples(
            st.integers(0, 64),
            st.integers(0, 512),
            st.floats(0, 2000),
            st.floats(0, 500),
            st.floats(0, 1e6),
            st.floats(1e-5, 10.0),
        ),
        min_size=1,
        max_size=40,
    ),
    at=st.tuples(*[st.floats(0, 1e4)] * 5),
    more=st.floats(0, 1e4),
    which=st.integers(0, 4),
)
def test_more_of_anything_never_takes_less_whatever_was_learned(history, at, more, which) -> None:
    cost = StepCost()
    for *counts, took_s in history:
        cost.learn(StepFeatures(*counts), took_s)
    larger = list(at)
    larger[which] += more
    base_s, larger_s = cost.predict_s(StepFeatures(*at)), cost.predict_s(StepFeatures(*larger))
    assert math.isfinite(larger_s)
    assert 0 <= base_s <= larger_s


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.0])
def test_distinct_experts_of_larger_batches_are_foretold_from_small_ones(skew: float) -> None:
    draw = np.random.default_rng(0)
    layers, experts, top_k = 4, 64, 6
    popularity = skew * draw.standard_normal((layers, experts))

    def touched(rows: int) -> int:
        scores = popularity + draw.gumbel(size=(rows, layers, experts))
        chosen = np.argsort(-scores, axis=2)[:, :, :top_k]
        return sum(np.unique(chosen[:, layer]).size for layer in range(layers))

    demand = ExpertDemand(layers * experts, layers * top_k)
    for _ in range(60):
        rows = int(draw.integers(2, 9))
        demand.learn(rows, 0, touched(rows), 0)
    assert demand.distinct(1) == layers * top_k
    for rows in (4, 16, 32):
        mean = np.mean([touched(rows) for _ in range(30)])
        assert demand.distinct(rows) == pytest.approx(mean, rel=0.12)
    counts = [demand.distinct(rows) for rows in range(200)]
    assert counts == sorted(counts)
    assert counts[-1] <= layers * experts


def test_the_share_of_missing_experts_is_that_of_late() -> None:
    demand = ExpertDemand(100, 10)
    for _ in range(100):
        demand.learn(4, 0, 30, 15)
    assert demand.missing(40) == pytest.approx(20, rel=0.01)
    for _ in range(200):
        demand.learn(4, 0, 30, 0)
    assert demand.missing(40) < 1


def test_a_model_without_experts_asks_for_none() -> None:
    demand = ExpertDemand(0, 0)
    demand.learn(4, 0, 0, 0)
    assert demand.distinct(8, 100) == 0.0
