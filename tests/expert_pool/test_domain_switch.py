"""Where domains take turns: labels and hints through a live pool, scored by its own counters."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cold_start import documents
from benchmarks.domain_switch import index_of, score
from expert_pool.routing_trace import RoutingTrace

LAYERS, EXPERTS, TOP_K, SLOTS = 3, 32, 3, 9


def trace_of(seed: int, documents: int = 12, tokens: int = 32) -> RoutingTrace:
    """A domain that has favourites in each layer; its documents have a few of their own."""
    draw = np.random.default_rng(seed)
    favourites = 2.0 * draw.standard_normal((LAYERS, EXPERTS))
    ids = []
    for _ in range(documents):
        scores = favourites + 0.5 * draw.standard_normal((LAYERS, EXPERTS))
        noisy = scores + draw.gumbel(size=(tokens, LAYERS, EXPERTS))
        ids.append(np.argsort(-noisy, axis=2)[:, :, :TOP_K])
    offsets = np.arange(documents) * tokens
    return RoutingTrace.of(f"domain-{seed}", np.concatenate(ids), EXPERTS, offsets)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    traces = {f"domain {seed}": trace_of(seed) for seed in (1, 2, 3)}
    halves = tuple({name: documents(t, half) for name, t in traces.items()} for half in (0, 1))
    return index_of(traces, tmp_path_factory.mktemp("switch")), halves


def test_after_a_switch_a_hint_begins_better_than_none_and_costs_few_reads(world):
    index, halves = world
    none = score(index, halves, "by turns", "none", SLOTS).row(4)
    hint = score(index, halves, "by turns", "hint", SLOTS).row(4)
    assert hint["hit_rate"] > none["hit_rate"] + 0.05
    assert hint["read_a_token"] < 1.02 * none["read_a_token"]
    assert hint["useful"] > 2 * (hint["wasted"] + hint["regretted"])
    assert hint["state"] != "off"


def test_a_client_that_calls_everything_alike_gains_and_costs_little(world):
    index, halves = world
    none = score(index, halves, "by turns", "none", SLOTS).row(48)
    alike = score(index, halves, "by turns", "alike", SLOTS).row(48)
    assert alike["hit_rate"] > none["hit_rate"] - 0.02
    assert alike["read_a_token"] < 1.03 * none["read_a_token"]


@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="needs recorded routing")
def test_on_recorded_routing_too(tmp_path):
    files = sorted((Path(os.environ["COTERIE_DATA"]) / "routing").glob("*.npz"))
    traces = {}
    for path in files:
        whole = RoutingTrace.read(path)
        # Six layers suffice, and take a fifth of the time.
        traces[path.stem] = RoutingTrace.of(
            path.stem, whole.demands[:, ::5], whole.num_experts, whole.doc_offsets
        )
    halves = tuple({name: documents(t, half)[:4] for name, t in traces.items()} for half in (0, 1))
    index = index_of(traces, tmp_path)
    none = score(index, halves, "by turns", "none", 24).row(4)
    hint = score(index, halves, "by turns", "hint", 24).row(4)
    assert hint["hit_rate"] > none["hit_rate"]
    assert hint["read_a_token"] < 1.05 * none["read_a_token"]
