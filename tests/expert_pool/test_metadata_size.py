"""What the pool knows about an expert takes few bytes, whatever serves it."""

import sys
from collections import deque
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import pytest
import torch

from core.step import SequencePart
from expert_pool.checksums import ChecksumBook
from expert_pool.expectations import Expectations
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from expert_pool.store import ExpertStore
from expert_pool.usage import Usage
from tests.expert_pool.fake_experts import FakeIndex, FakeModel, FakeShape

LAYERS, EXPERTS, TOP_K = 58, 256, 8
_LEFT_OUT = (torch.Tensor, torch.nn.Module, FakeIndex, ExpertStore, PoolSettings, type, Enum)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def sizes_below(root, left_out) -> dict[str, int]:
    """Bytes of arrays, containers and numbers that can be reached from an object, by holder."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo = [(root, type(root).__name__)]
    while todo:
        thing, holder = todo.pop()
        if id(thing) in seen or isinstance(thing, _LEFT_OUT + _CODE + left_out):
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            base = thing
            while isinstance(base.base, np.ndarray):
                base = base.base
            if base is thing or id(base) not in seen:
                seen.add(id(base))
                found[holder] = found.get(holder, 0) + base.nbytes + sys.getsizeof(np.empty(0))
            continue
        found[holder] = found.get(holder, 0) + sys.getsizeof(thing)
        if isinstance(thing, dict):
            todo += [(part, holder) for pair in thing.items() for part in pair]
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            todo += [(part, holder) for part in thing]
        names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [getattr(thing, name) for name in names if hasattr(thing, name)]
        parts += getattr(thing, "__dict__", {}).values()
        todo += [(part, type(thing).__name__) for part in parts]
    return found


@pytest.mark.parametrize("prefetch", ["off", "auto"])
def test_at_most_256_bytes_an_expert(tmp_path, prefetch):
    shape = FakeShape(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, hidden=16, width=8)
    index = FakeIndex(tmp_path, shape)
    memory = 24 * sum(layer.slot_bytes for layer in index.layers)
    pool = ExpertPool(index, PoolSettings(expert_memory=memory, prefetch=prefetch))
    pool.attach(FakeModel(index))
    draw = np.random.default_rng(0)
    for _ in range(6):
        pool.begin_step()
        for layer in range(LAYERS):
            counts = np.bincount(draw.permutation(EXPERTS)[:TOP_K], minlength=EXPERTS)
            for _experts in pool.demand(layer, counts, 1):
                pass
        pool.end_step()
    assert isinstance(pool._checksums, ChecksumBook)
    sizes = sizes_below(pool, left_out=(Expectations,))
    pool.close()
    total = sum(sizes.values()) / (LAYERS * EXPERTS)
    assert sizes["AffinityPolicy"] / (LAYERS * EXPERTS) > 64, "the walk missed the largest part"
    by_size = sorted(sizes.items(), key=lambda pair: -pair[1])
    assert total <= 256, [(name, round(size / (LAYERS * EXPERTS), 1)) for name, size in by_size]
    print([(name, round(size / (LAYERS * EXPERTS), 1)) for name, size in by_size[:14]], total)


def test_popularity_takes_no_more_than_its_setting_grants(tmp_path):
    """And 32 bytes an expert, for everyone's, at the end of it all."""
    shape = FakeShape(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, hidden=16, width=8)
    index = FakeIndex(tmp_path, shape)
    memory = 24 * sum(layer.slot_bytes for layer in index.layers)
    granted = 4 * 2**20
    pool = ExpertPool(index, PoolSettings(expert_memory=memory, popularity_memory=granted))
    draw = np.random.default_rng(0)
    for step in range(50):
        parts = tuple(
            SequencePart(
                sequence_id=8 * step + at,
                start=0,
                token_ids=(1, 2),
                block_ids=(0,),
                is_decode=False,
                wants_logits=True,
                tenant=f"tenant {at}",
                domain=f"domain {step}",
                session=f"session {step} {at}",
            )
            for at in range(8)
        )
        pool.begin_step(parts)
        for layer in (0, 30):
            chosen = np.sort(draw.integers(0, EXPERTS, 16 * TOP_K))
            rows = draw.integers(0, 16, chosen.size)
            counts = np.bincount(chosen, minlength=EXPERTS)
            for _experts in pool.demand(layer, counts, 16, rows=lambda rows=rows: rows):
                pass
        pool.end_step()
        pool.signature(f"domain {step}", f"session {step} 0", (), "tenant 0")
    pool.routing_summary()
    sizes = sizes_below(pool.expectations, left_out=(ExpertPool, Usage))
    pool.close()
    assert sum(sizes.values()) > granted / 2, "the walk missed the tables"
    assert sum(sizes.values()) <= granted + 32 * LAYERS * EXPERTS, sizes
    assert pool.expectations.nbytes <= granted + 32 * LAYERS * EXPERTS
