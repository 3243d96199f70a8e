"""Times an engine's steps: what each did and took, for the step statistics and for the sizer."""

from __future__ import annotations

import time
from collections.abc import Callable

from core.request import Request
from core.step import BatchStats, StepStats
from engine.batch_size import BatchLimit, BatchSizer
from engine.batcher import Batch
from engine.coherent_admission import AdmissionOrder
from engine.sequence import Sequence
from engine.step_cost import StepFeatures


class StepMeter:
    """One engine's; its clock is the one that sequences are stamped by."""

    def __init__(
        self,
        sizer: BatchSizer,
        clock: Callable[[], float],
        order: AdmissionOrder | None = None,
    ) -> None:
        self._sizer = sizer
        self._order = order
        self._clock = clock
        self._held_since_s: float | None = None
        self._held_s = 0.0
        self._began_s = 0.0

    def stamp(self, sequence: Sequence, request: Request) -> None:
        """When a sequence's request came, and when nobody wants its answer any more."""
        now_s, wall_s = self._clock(), time.time()
        sequence.arrived_s = now_s
        if request.arrival_s:
            sequence.arrived_s -= max(0.0, wall_s - request.arrival_s)
        if request.deadline_s is not None:
            sequence.deadline_s = now_s + request.deadline_s - wall_s

    def first_token(self, sequence: Sequence) -> None:
        """A sequence said something; its time per token runs from the first time on."""
        if sequence.first_token_s is None:
            sequence.first_token_s = self._clock()

    def put_off(self, hold_s: float) -> float:
        """The next step is put off by so much from now; returns it."""
        if hold_s > 0 and self._held_since_s is None:
            self._held_since_s = self._clock()
        return hold_s

    def begin(self) -> None:
        """A step begins: what it waits for from now on is its own."""
        self._began_s = self._clock()
        since_s, self._held_since_s = self._held_since_s, None
        self._held_s = 0.0 if since_s is None else self._began_s - since_s

    def planned(self, batch: Batch, limit: BatchLimit, stats: StepStats) -> None:
        """Notes what is about to run, and what is expected of it."""
        plan = batch.plan
        stats.decode_tokens = sum(len(part.token_ids) for part in plan.parts if part.is_decode)
        stats.prefill_tokens = plan.num_tokens - stats.decode_tokens
        stats.kv_tokens = sum(part.start + len(part.token_ids) for part in plan.parts)
        predicted_s = 0.0
        if not plan.layer_major:
            predicted_s = self._sizer.predict_s(
                stats.decode_tokens, stats.prefill_tokens, stats.kv_tokens
            )
        stats.batch = BatchStats(
            sequences=limit.sequences,
            prefill_tokens=limit.prefill_tokens,
            reason=limit.reason,
            predicted_s=predicted_s,
            model_error=self._sizer.cost.error,
            held_s=self._held_s,
        )
        if self._order is not None:
            stats.batch.overtaken = self._order.take_overtaken()
            stats.batch.grouping = self._order.state
            stats.batch.grouping_gain = self._order.gain

    def ended(self, batch: Batch, stats: StepStats) -> None:
        """The step is through, and all of it was computed. Passes layer by layer teach nothing."""
        if batch.plan.layer_major:
            return
        pool = stats.pool
        if self._order is not None:
            distinct = pool.demand_hits + pool.demand_misses
            self._order.stepped(batch.sequences, batch.plan.num_tokens, distinct)
        if self._sizer.is_fixed:
            return
        features = StepFeatures(
            stats.decode_tokens,
            stats.prefill_tokens,
            pool.demand_hits + pool.demand_misses,
            pool.demand_misses,
            stats.kv_tokens,
        )
        self._sizer.learn(features, self._clock() - self._began_s)
