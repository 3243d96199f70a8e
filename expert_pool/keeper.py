"""Who decides about a layer's slots is told what the layer is asked for, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from core.step import PoolStepStats
from expert_pool.quotas import QuotaKeeper
from expert_pool.regret import RegretMeter
from expert_pool.residency import Residency
from expert_pool.settings import PoolSettings
from expert_pool.store import PRELOAD
from expert_pool.tables import IntArray, State

if TYPE_CHECKING:
    from expert_pool.pool import ExpertPool


class Keeper:
    """Policy, quotas and regret of one pool. Layers with a slot for every expert are left alone."""

    def __init__(self, residency: Residency, settings: PoolSettings) -> None:
        layers = residency.layers
        self._residency = residency
        self._returns_before = 0
        self._regret: RegretMeter | None = None
        self._quotas: QuotaKeeper | None = None
        if not all(map(residency.has_slots_for_all, range(len(layers)))):
            if settings.regret_layers:
                experts = [layer.num_experts for layer in layers]
                self._regret = RegretMeter(experts, settings.regret_layers)
            if settings.move_quotas:
                self._quotas = residency.quota_keeper = residency.make_quota_keeper()

    def demanded(
        self,
        layer: int,
        experts: IntArray,
        counts: IntArray,
        tokens: int,
        missing: IntArray,
        weights: Callable[[], npt.NDArray[np.floating]] | None,
    ) -> None:
        """Before the layer's pass: `tokens` chose `experts`, of which `missing` are not there.

        `weights()`: what each expert of the layer got of the router's weights.
        """
        residency, policy = self._residency, self._residency.policy
        if self._regret is not None and layer in self._regret.layers:
            holders = residency.states.holders(layer)
            self._regret.record(layer, holders, residency.quotas[layer], experts, missing.size)
        given = None
        if weights is not None and policy.wants_weights:
            given = weights()[experts]
        policy.touch(layer, experts, counts, tokens, given)
        if missing.size:
            policy.missed(layer, missing)
        room = residency.room_for(layer, experts)
        if self._quotas is not None and experts.size <= room:

            def others() -> IntArray:
                idle = residency.evictable(layer)
                return idle[~np.isin(idle, experts)]

            self._quotas.demanded(layer, experts, missing, room, others)

    def demanded_of_whole(self, layer: int, experts: IntArray) -> None:
        """As `demanded`, of a layer with a slot for every expert, which has nothing to decide."""
        if self._quotas is not None:
            self._quotas.demanded_of_whole(layer, experts)

    def end_step(self, stats: PoolStepStats) -> list[tuple[int, int]]:
        """Adds to `stats`; returns the slots to move now, as (from layer, to layer)."""
        returns = self._residency.policy.returns
        stats.returns = returns - self._returns_before
        self._returns_before = returns
        if self._regret is not None:
            stats.optimum_misses, stats.compared_misses = self._regret.take()
        moves = [] if self._quotas is None else self._quotas.review(self._residency.quotas)
        stats.moved_slots = len(moves)
        return moves

    def close(self) -> None:
        """End what runs beside the step's thread."""
        if self._regret is not None:
            self._regret.close()


def move_slots(pool: ExpertPool, source: int, target: int, slots: int) -> None:
    """As `ExpertPool.move_quota`."""
    pair = (source, target)
    preloads = [(load.layer, load.expert) for load in pool.under_way if load.priority == PRELOAD]
    for layer in pair:
        pool.call_off_preloads(layer)
    while any(load.layer in pair for load in pool.under_way):
        pool.collect(wait=True)
    residency = pool.residency
    try:
        residency.move_quota(source, target, slots)
    finally:
        for layer, expert in preloads:
            if (
                residency.states.state[layer, expert] == State.UNLOADED
                and layer in pair
                and residency.num_free(layer)
            ):
                for _, slot in residency.admit(layer, [expert]):
                    pool.submit(layer, expert, slot, PRELOAD)
