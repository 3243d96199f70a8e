"""Replay of a recorded trace through eviction policies, next to the optimum of the same capacity.

One row is one step; the cache is kept over documents and starts empty. A policy is called as the
live pool calls it: `touch` with what a layer is asked for, then `victims` among the residents that
the step does not need. `per_layer` gives each layer `capacity` slots; `global` gives one pool of
layers x capacity slots to all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from core.errors import SettingsError
from expert_pool.eviction_rules import EvictionRules
from expert_pool.oracle import ABSENT, as_one_cache, belady_misses
from expert_pool.policies import Policy, make_policy
from expert_pool.routing_trace import RoutingTrace
from expert_pool.settings import PoolSettings
from expert_pool.tables import IntArray

Scope = Literal["per_layer", "global"]

OPTIMUM: Final = "belady"
POLICIES: Final = ("lru", "lfu", "affinity", OPTIMUM)
GLOBAL_POLICIES: Final = ("lru", OPTIMUM)
"""Replayed in one pool for all layers too: the baseline that per-layer quotas must beat."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one policy did with one trace at one capacity a layer."""

    policy: str
    default: bool
    """Whether this is what a server runs unless told otherwise."""
    capacity: int
    scope: Scope
    hit_rate: float
    misses: int
    misses_over_belady: float
    """Against the optimum of the same scope and capacity."""
    decision_us_p99: float | None
    """CPU time of touch and victims together, for one layer of one step. None for the optimum,
    which decides afterwards."""


def replay(
    trace: RoutingTrace, policies: Sequence[str], capacities: Sequence[int]
) -> Iterator[ReplayResult]:
    """Every policy at every capacity: per layer first, then in one pool where that is defined.

    Raises SettingsError for an unknown policy, or a capacity below one step's experts.
    """
    for policy in policies:
        if policy not in POLICIES:
            raise SettingsError(f"expected policies among {', '.join(POLICIES)}, found {policy!r}")
    for capacity in capacities:
        if capacity < trace.widest:
            raise SettingsError(
                f"expected a capacity of at least the {trace.widest} experts that one step of "
                f"this trace asks of a layer, found {capacity}"
            )
    yield from _replay_scope(trace, policies, capacities, "per_layer")
    shared = [policy for policy in policies if policy in GLOBAL_POLICIES]
    if shared:
        yield from _replay_scope(trace, shared, capacities, "global")


def _replay_scope(
    trace: RoutingTrace, policies: Sequence[str], capacities: Sequence[int], scope: Scope
) -> Iterator[ReplayResult]:
    layers = trace.demands.shape[1]
    demands, num_experts, slots = trace.demands, trace.num_experts, list(capacities)
    if scope == "global":
        demands = as_one_cache(demands, num_experts)
        num_experts, slots = layers * num_experts, [layers * capacity for capacity in capacities]
    optimum = [int(belady_misses(demands, num_experts, number).sum()) for number in slots]
    for name in policies:
        runs: list[tuple[int, float | None]] = [(misses, None) for misses in optimum]
        if name != OPTIMUM:
            policy: Policy = make_policy(name, demands.shape[1], num_experts)
            weights = None
            if name == PoolSettings().policy and scope == "per_layer":
                # As it is served.
                hysteresis = PoolSettings().hysteresis
                policy = EvictionRules(policy, demands.shape[1], num_experts, hysteresis)
                weights = trace.weights
            runs = replay_policy(policy, demands, num_experts, slots, weights)
        for capacity, best, (misses, p99) in zip(capacities, optimum, runs, strict=True):
            yield ReplayResult(
                policy=name,
                default=scope == "per_layer" and name == PoolSettings().policy,
                capacity=capacity,
                scope=scope,
                hit_rate=1.0 - misses / trace.accesses,
                misses=misses,
                misses_over_belady=misses / best,
                decision_us_p99=p99,
            )


def replay_policy(
    policy: Policy,
    demands: IntArray,
    num_experts: int,
    capacities: Sequence[int],
    weights: npt.NDArray[np.float32] | None = None,
) -> list[tuple[int, float | None]]:
    """(misses, p99 of a decision in microseconds) at each capacity.

    A decision is timed by the thread's own CPU clock: on a busy machine a wall clock would time
    the others. No policy is told its capacity, so one pass of touches serves them all. `weights`
    are the router's, for hysteresis.
    """
    steps, layers, _ = demands.shape
    caches = [_Cache(layers, num_experts, capacity) for capacity in capacities]
    decisions_ns: list[list[int]] = [[] for _ in capacities]
    clock = time.thread_time_ns
    for step in range(steps):
        for layer in range(layers):
            demand = demands[step, layer]
            experts = demand if demand[-1] != ABSENT else demand[demand != ABSENT]
            if not experts.size:
                continue
            counts = np.ones_like(experts)
            given = None if weights is None else weights[step, layer][: experts.size]
            before = clock()
            if given is not None and isinstance(policy, EvictionRules):
                policy.touch(layer, experts, counts, 1, given)
            else:
                policy.touch(layer, experts, counts, 1)
            touch_ns = clock() - before
            for cache, spent_ns in zip(caches, decisions_ns, strict=True):
                candidates, excess = cache.admit(layer, experts)
                if excess <= 0:
                    spent_ns.append(touch_ns)
                    continue
                before = clock()
                victims = policy.victims(layer, candidates, excess)
                spent_ns.append(touch_ns + clock() - before)
                cache.evict(layer, victims)
    return [
        (cache.misses, float(np.percentile(spent_ns, 99)) / 1e3)
        for cache, spent_ns in zip(caches, decisions_ns, strict=True)
    ]


class _Cache:
    """Who is resident, by layer."""

    def __init__(self, num_layers: int, num_experts: int, capacity: int) -> None:
        self.capacity = capacity
        self.misses = 0
        self._resident: npt.NDArray[np.bool_] = np.zeros((num_layers, num_experts), np.bool_)
        self._sizes = [0] * num_layers

    def admit(self, layer: int, experts: IntArray) -> tuple[IntArray, int]:
        """Make `experts` resident. Returns whom else could leave, and how many must."""
        resident = self._resident[layer]
        missing = experts.size - int(np.count_nonzero(resident.take(experts)))
        self.misses += missing
        self._sizes[layer] += missing
        excess = self._sizes[layer] - self.capacity
        candidates = experts[:0]
        if excess > 0:
            resident[experts] = False
            candidates = np.flatnonzero(resident)
        if missing:
            resident[experts] = True
        return candidates, excess

    def evict(self, layer: int, victims: IntArray) -> None:
        """Take `victims` out."""
        self._resident[layer][victims] = False
        self._sizes[layer] -= victims.size
