"""Exactness level R: where an expert lies never changes a bit of the logits.

A plan log is recorded with every expert resident, then replayed while a fuzzer evicts before
every access, preloads, moves quotas, and delays, reorders and fails reads.
"""

import functools
import logging
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from expert_pool import experts_forward
from expert_pool.grouped_linear import ExpertGroup
from expert_pool.kernels.choice import choice_of
from expert_pool.tables import AddressTable, ResidencyViolation, State, StateTable
from expert_pool.transformers_private import experts_modules
from tests.expert_pool.native_layers import kernels_or_skip
from tests.expert_pool.plan_log import PlanLog, record, replay
from tests.models.families import make_checkpoint

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
MODELS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "gemma4_text", "nemotron_h", "demo")
SEEDS = (0, 1, 2)  # a policy each


@pytest.fixture(autouse=True)
def quiet_readers(caplog):
    """Thousands of reads fail here, on purpose."""
    caplog.set_level(logging.ERROR, logger="expert_pool.store")


@pytest.fixture(scope="module")
def logs():
    """Plan logs by (model, dtype), each made once."""
    with tempfile.TemporaryDirectory(prefix="coterie-replay-") as folder:

        @functools.cache
        def log_of(model: str, dtype: str, kernel: str = "torch") -> PlanLog:
            if model == "demo":
                source = DEMO_MODEL
            else:
                source = make_checkpoint(model, Path(folder) / "made", dtype)
            # A copy, as checksums are kept beside it.
            path = Path(folder) / f"{model}-{dtype}-{kernel}"
            shutil.copytree(source, path, ignore=shutil.ignore_patterns(".coterie"))
            return record(path, dtype, kernel=kernel)

        yield log_of


@pytest.mark.parametrize(
    ("model", "dtype", "kernel"),
    [
        *((model, dtype, "torch") for dtype in ("float32", "bfloat16") for model in MODELS),
        # All forms of experts, and activations of four kinds.
        *(
            (model, "bfloat16", "native")
            for model in (
                "qwen3_moe",
                "gemma4_text",
                "nemotron_h",
                "demo",
                "gpt_oss",
                "llama4_text",
            )
        ),
    ],
)
def test_logits_are_bitwise_equal_wherever_experts_lie(logs, model, dtype, kernel):
    if kernel == "native":
        kernels_or_skip()
    log = logs(model, dtype, kernel)
    if kernel == "native":
        assert all(choice_of(module) is not None for module in experts_modules(log.model).values())
    assert sum(plan.num_tokens for plan in log.plans) > 60
    assert len(set(log.hashes)) > len(log.hashes) / 2
    quiet = replay(log, seed=0, fuzz=False)
    assert quiet.hashes == log.hashes
    faults = evictions = misses = waves = prefetched = hinted = 0
    for seed in SEEDS:
        disturbed = replay(log, seed)
        assert disturbed.hashes == log.hashes, f"seed {seed}"
        shape = log.index.shape
        for plan, stats in zip(log.plans, disturbed.stats, strict=True):
            assert stats.failed_rows == stats.bad_rows == ()
            pairs = plan.num_tokens * sum(layer.top_k for layer in shape.moe_layers)
            assert stats.routed_pairs == pairs
            evictions += stats.evictions
            prefetched += stats.prefetch.begun  # whether in time depends on the machine
            hinted += stats.hints.begun
            misses += stats.demand_misses
            waves += stats.waves > len(shape.moe_layers)
        faults += disturbed.faults
    assert min(faults, evictions, misses, waves, prefetched, hinted) > 0, "the fuzzer did nothing"


def swap_the_combine_order(monkeypatch):
    right = experts_forward._combine
    monkeypatch.setattr(
        experts_forward,
        "_combine",
        lambda by_pair, num_rows, dtype: right(
            by_pair.view(num_rows, -1, by_pair.shape[-1]).flip(1).flatten(0, 1), num_rows, dtype
        ),
    )


def split_an_expert(monkeypatch):
    def halves(group):
        stops = np.cumsum(group.counts)
        for slot, start, stop in zip(group.slots, stops - group.counts, stops, strict=True):
            middle = (start + stop + 1) // 2
            yield int(slot), int(start), int(middle)
            if middle < stop:
                yield int(slot), int(middle), int(stop)

    monkeypatch.setattr(ExpertGroup, "is_grouped", False)
    monkeypatch.setattr(ExpertGroup, "runs", property(lambda group: list(halves(group))))


def reuse_pinned_slots(monkeypatch):
    def pinned_first(table, layer):
        resident = table.state[layer] == State.RESIDENT
        pinned = np.flatnonzero(resident & (table.pins[layer] > 0))
        return pinned if pinned.size else np.flatnonzero(resident)

    monkeypatch.setattr(StateTable, "evictable", pinned_first)


def use_stale_addresses(monkeypatch):
    right, known = AddressTable.lookup, {}

    def stale(table, layer, experts):
        slots = right(table, layer, experts)
        for at, expert in enumerate(experts.tolist()):
            slots[at] = known.setdefault((id(table), layer, expert), int(slots[at]))
        return slots

    monkeypatch.setattr(AddressTable, "lookup", stale)


MUTATIONS = (swap_the_combine_order, split_an_expert, reuse_pinned_slots, use_stale_addresses)


# In bf16 the order of four addends of 8 bits is exact in an fp32 sum, and the products do not
# depend on the number of rows: the first two mutations change no bit there. Nor does the first
# one with two addends (Mixtral).
@pytest.mark.parametrize(
    ("model", "mutate", "dtype", "kernel"),
    [
        *(
            (model, m, "float32", "torch")
            for model in ("qwen3_moe", "gpt_oss", "demo")
            for m in MUTATIONS
        ),
        ("mixtral", split_an_expert, "float32", "torch"),
        ("qwen3_moe", reuse_pinned_slots, "bfloat16", "torch"),
        ("qwen3_moe", use_stale_addresses, "bfloat16", "torch"),
        ("demo", reuse_pinned_slots, "bfloat16", "torch"),
        ("qwen3_moe", reuse_pinned_slots, "bfloat16", "native"),
        ("qwen3_moe", use_stale_addresses, "bfloat16", "native"),
    ],
)
def test_a_mutation_is_found(logs, monkeypatch, model, mutate, dtype, kernel):
    if kernel == "native":
        kernels_or_skip()
    log = logs(model, dtype, kernel)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, ResidencyViolation)):
        for seed in SEEDS:
            assert replay(log, seed).hashes == log.hashes


def test_a_pinned_slot_that_is_reused_unseen_still_shows(logs, monkeypatch):
    """The check on pins taken out as well: the states or the logits give it away."""
    log = logs("qwen3_moe", "float32", "torch")
    reuse_pinned_slots(monkeypatch)

    def evict(table, layer, expert):
        table._move(layer, expert, (State.RESIDENT,), State.UNLOADED)
        table.resident_counts[layer] -= 1

    monkeypatch.setattr(StateTable, "evict", evict)
    with pytest.raises((AssertionError, ResidencyViolation)):
        for seed in SEEDS:
            assert replay(log, seed).hashes == log.hashes


def test_hashes_see_a_single_bit():
    from tests.expert_pool.plan_log import hash_logits

    logits = torch.randn(3, 7)
    other = logits.clone()
    other.view(torch.int32)[2, 6] ^= 1
    assert hash_logits(logits) != hash_logits(other)
