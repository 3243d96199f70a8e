"""What the pool knows about an expert takes few bytes, whatever serves it."""

import sys
from collections import deque
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
import pytest
import torch

from expert_pool.checksums import ChecksumBook
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from expert_pool.store import ExpertStore
from tests.expert_pool.fake_experts import FakeIndex, FakeModel, FakeShape

LAYERS, EXPERTS, TOP_K = 58, 256, 8
_LEFT_OUT = (torch.Tensor, torch.nn.Module, FakeIndex, ExpertStore, PoolSettings, type, Enum)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def sizes_below(root) -> dict[str, int]:
    """Bytes of arrays, containers and numbers that can be reached from an object, by holder."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo = [(root, type(root).__name__)]
    while todo:
        thing, holder = todo.pop()
        if id(thing) in seen or isinstance(thing, _LEFT_OUT + _CODE):
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
    sizes = sizes_below(pool)
    pool.close()
    total = sum(sizes.values()) / (LAYERS * EXPERTS)
    assert sizes["AffinityPolicy"] / (LAYERS * EXPERTS) > 64, "the walk missed the largest part"
    by_size = sorted(sizes.items(), key=lambda pair: -pair[1])
    assert total <= 256, [(name, round(size / (LAYERS * EXPERTS), 1)) for name, size in by_size]
    print([(name, round(size / (LAYERS * EXPERTS), 1)) for name, size in by_size[:14]], total)
