"""Prefetch in a live pool: asks the Prefetcher at each layer and does what it says."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from core.step import PrefetchStats, SequencePart
from expert_pool.forecast import FloatArray
from expert_pool.next_gate import NextGate, as_scores
from expert_pool.prefetch import Prefetcher
from expert_pool.store import PREFETCH, PRELOAD, Load
from expert_pool.tables import IntArray

if TYPE_CHECKING:
    from expert_pool.pool import ExpertPool


class ReadAhead:
    """Belongs to one pool in which not every expert has a slot."""

    def __init__(self, pool: ExpertPool, always: bool) -> None:
        """`always`: reads ahead whether it pays or not."""
        self._pool = pool
        self._always = always
        self._gates: NextGate | None = None
        self._gate: tuple[int, torch.Tensor] | None = None
        """A layer, and its experts' scores by its own gate: on their way to the host."""
        self.prefetcher = self._new_prefetcher()

    def attach(self, model: torch.nn.Module) -> None:
        """Find the gates of the model."""
        layers = self._pool.index.layers
        self._gates = NextGate(
            model,
            [layer.module_name for layer in layers],
            [layer.num_experts for layer in layers],
            [layer.top_k for layer in layers],
        )
        self.prefetcher = self._new_prefetcher()

    def begin_step(
        self,
        parts: Iterable[SequencePart],
        in_order: bool = False,
        rates: FloatArray | None = None,
    ) -> None:
        """The sequences that pass in this step; `in_order`: layer by layer.

        `rates` [layers, experts]: what their labels let expect.
        """
        self._gate = None
        self.prefetcher.begin_step(parts, in_order, rates)

    def end_step(self, stall_s: float) -> PrefetchStats:
        """What came of it in the step, in which reads were awaited for `stall_s` seconds."""
        return self.prefetcher.end_step(stall_s)

    def look(self, layer: int, hidden: torch.Tensor) -> None:
        """Have a later layer's gate look at `layer`'s hidden states [T, H].

        Call it before the routing is brought to the host: on an accelerator that wait is then the
        only one.
        """
        target = self.prefetcher.target(layer)
        if (
            self._gates is None
            or target is None
            or self._pool.residency.states.is_whole(target)
            or not self.prefetcher.forecaster.wants_gate(target, hidden.shape[0])
        ):
            return
        scores = self._gates.begin(target, hidden)
        self._gate = None if scores is None else (target, scores)

    def demanded(self, layer: int, experts: IntArray, counts: IntArray, tokens: int) -> list[int]:
        """A layer is asked for `experts`. Returns whom nobody needs of those on their way."""
        states = self._pool.residency.states.state[layer]
        return self.prefetcher.demanded(layer, experts, counts, tokens, states)

    def start(self, layer: int) -> bool:
        """Begin to read for a later layer, now that `layer`'s own reads are under way.

        True if any of those that were begun here, or before, are on their way.
        """
        prefetcher, residency = self.prefetcher, self._pool.residency
        gate, self._gate = self._gate, None
        target = prefetcher.target(layer)
        if target is None or residency.states.is_whole(target):
            return prefetcher.num_under_way > 0
        policy = residency.policy
        choices = prefetcher.choose(
            target,
            residency.states.state[target],
            residency.num_free(target),
            lambda number: policy.victims(target, residency.evictable(target), number),
            lambda: policy.worth(target),
            None if gate is None or gate[0] != target else as_scores(gate[1], prefetcher.width),
        )
        for choice in choices:
            if choice.victim is not None:
                residency.evict_if_idle(target, choice.victim)
            if not residency.num_free(target):
                break
            for expert, slot in residency.admit(target, [choice.expert]):
                prefetcher.began(target, choice)
                self._pool.submit(target, expert, slot, PREFETCH)
        return prefetcher.num_under_way > 0

    def came(self, load: Load) -> None:
        """A load is over, one way or the other."""
        if load.error is not None:
            self.prefetcher.failed(load.layer, load.expert)
        elif load.priority != PRELOAD:  # of those it is not known whether they are of use
            self.prefetcher.came(load.layer, load.expert, load.record_bytes)

    def _new_prefetcher(self) -> Prefetcher:
        layers = self._pool.index.layers
        gates = self._gates
        return Prefetcher(
            [layer.num_experts for layer in layers],
            [layer.top_k for layer in layers],
            [self._pool.index.record(layer.ordinal, 0).nbytes for layer in layers],
            self._pool.clock,
            self._always,
            has_gate=gates is not None and all(gates.knows(layer.ordinal) for layer in layers),
        )


class PassTimer:
    """Times one pass of a layer for the prefetcher: computing, waiting, and its reads."""

    def __init__(self, ahead: ReadAhead) -> None:
        self._ahead = ahead
        self._compute_s = 0.0
        self._stall_s = 0.0
        self._began_s: list[float] = []
        self._ended_s: list[float] = []
        self._since = 0.0
        self.alone = True
        """Whether nothing but the pass's own reads is on its way."""

    def computes(self) -> None:
        """The pass hands out experts to be computed."""
        self._since = time.perf_counter()

    def computed(self) -> None:
        """They have been."""
        self._compute_s += time.perf_counter() - self._since

    def waited(self, seconds: float) -> None:
        """Nothing was left to compute for so long."""
        self._stall_s += seconds

    def read(self, load: Load) -> None:
        """One of the pass's reads is over."""
        self._began_s.append(load.began_s)
        self._ended_s.append(load.ended_s)

    def over(self) -> None:
        """The pass is over."""
        alone = self.alone and bool(self._ended_s)
        wait_s = max(self._ended_s) - min(self._began_s) if alone else None
        self._ahead.prefetcher.pass_ended(self._compute_s, self._stall_s, wait_s)
