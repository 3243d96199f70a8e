"""A rank on a virtual clock: the real batcher and sizer, recorded routing, a machine in numbers.

Nothing is computed and nothing sleeps. Which experts a step asks for comes from a routing trace:
each sequence starts at a document of its own and goes on from there, one row a token. How long the
step takes comes from `Machine`, with noise and a pause now and then; the sizer sees no more than
an engine would, and learns from that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.objectives import ObjectiveSettings
from core.request import Request, SamplingParams
from engine.batch_size import Batching, BatchSizer
from engine.batcher import Batch, Batcher
from engine.expert_demand import ExpertDemand
from engine.kv_pages import KvPages
from engine.sequence import Sequence
from engine.step_cost import StepCost, StepFeatures
from engine.step_forecast import SizeBounds
from expert_pool.oracle import ABSENT
from expert_pool.routing_trace import RoutingTrace

_BLOCK_TOKENS = 256
_WORD_BITS = 64
CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides a step's time: overhead + max(bytes / bandwidth, work / compute) + reads.

    The default is a two-socket server without an accelerator that runs a model of the shape of
    DeepSeek-V2-Lite in bfloat16.
    """

    overhead_s: float = 0.005
    bandwidth_bytes_s: float = 300e9
    compute_flop_s: float = 40e12
    disk_bytes_s: float = 6e9
    expert_bytes: float = 17.3e6
    backbone_bytes: float = 2.6e9
    kv_bytes_token: float = 31e3
    flop_token: float = 4.8e9
    resident_share: float = 1.0
    """Of the experts, by how often the trace asks for them; the others are read when asked for."""
    noise: float = 0.05
    """Standard deviation of a step's time, as a share of it."""
    pause_share: float = 0.002
    """Of the steps: they take three times as long, as if somebody else had the machine."""

    def step_s(self, tokens: int, experts: int, missing: int, kv_tokens: int) -> float:
        """Seconds, before noise."""
        nbytes = self.backbone_bytes + experts * self.expert_bytes + kv_tokens * self.kv_bytes_token
        work_s = tokens * self.flop_token / self.compute_flop_s
        read_s = missing * self.expert_bytes / self.disk_bytes_s
        return self.overhead_s + max(nbytes / self.bandwidth_bytes_s, work_s) + read_s


class Routes:
    """A routing trace as bit sets, so that what a step asks for is one `or` over its rows."""

    def __init__(self, trace: RoutingTrace, resident_share: float) -> None:
        steps, layers, _ = trace.demands.shape
        self.rows = steps
        self.starts = trace.doc_offsets
        self.experts = layers * trace.num_experts
        self.per_token = round(trace.accesses / steps)
        self._words = -(-trace.num_experts // _WORD_BITS)
        self._bits = np.zeros((steps, layers, self._words), dtype=np.uint64)
        for slot in range(trace.demands.shape[2]):
            asked = trace.demands[:, :, slot]
            step, layer = np.nonzero(asked != ABSENT)
            word, bit = np.divmod(asked[step, layer], _WORD_BITS)
            np.bitwise_or.at(self._bits, (step, layer, word), np.uint64(1) << bit.astype(np.uint64))
        self._absent = self._missing(trace, resident_share)

    def _missing(self, trace: RoutingTrace, share: float) -> npt.NDArray[np.uint64]:
        """Bits of the experts without a slot: in each layer the least popular ones."""
        _, layers, _ = trace.demands.shape
        absent = np.zeros((layers, self._words), dtype=np.uint64)
        for layer in range(layers):
            asked = trace.demands[:, layer]
            popular = np.bincount(asked[asked != ABSENT], minlength=trace.num_experts)
            rest = trace.num_experts - round(share * trace.num_experts)
            for expert in np.argsort(popular, kind="stable")[:rest].tolist():
                word, bit = divmod(expert, _WORD_BITS)
                absent[layer, word] |= np.uint64(1 << bit)
        return absent

    def asked(self, rows: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Distinct (layer, expert) pairs of these rows together, and those that are missing."""
        union = np.bitwise_or.reduce(self._bits[rows % self.rows], axis=0)
        return (
            int(np.bitwise_count(union).sum()),
            int(np.bitwise_count(union & self._absent).sum()),
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    steps: int = 0
    tokens: int = 0
    distinct: int = 0
    held_s: float = 0.0
    first_in_time: int = 0
    first_all: int = 0
    rest_in_time: int = 0
    rest_all: int = 0
    both_in_time: int = 0
    done: int = 0
    ended_s: float = 0.0
    most_steps_waited: int = 0
    model_error: float = 0.0


class Simulation:
    """One policy under one stream of requests."""

    def __init__(
        self,
        machine: Machine,
        routes: Routes,
        objectives: ObjectiveSettings,
        batching: Batching,
        bounds: SizeBounds,
        seed: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.outcome = Outcome()
        self._machine = machine
        self._routes = routes
        self._objectives = objectives
        self._draw = np.random.default_rng(seed)
        self.sizer = BatchSizer(
            batching,
            bounds,
            objectives,
            StepCost(),
            ExpertDemand(routes.experts, routes.per_token),
            lambda: self.now_s,
        )
        blocks = bounds.most * -(-CONTEXT_TOKENS // _BLOCK_TOKENS)
        self.batcher = Batcher(
            KvPages(blocks, _BLOCK_TOKENS), bounds.most, bounds.step_tokens, sizer=self.sizer
        )
        self._start_of: dict[int, int] = {}
        self._counted_from_s = 0.0
        self._live: dict[int, Sequence] = {}

    def run(
        self, arrivals: Seq[Arrival], settle_share: float = 0.1, drain: bool = False
    ) -> Outcome:
        """Until the last request has come; with `drain`, and where all come at once, until all are
        done.

        Requests and steps of the first `settle_share` of that time are not counted.
        """
        end_s = arrivals[-1].at_s
        self._counted_from_s = settle_share * end_s
        queue = [(a.at_s, number, a) for number, a in enumerate(arrivals)]
        heapq.heapify(queue)
        while True:
            while queue and queue[0][0] <= self.now_s:
                _, number, arrival = heapq.heappop(queue)
                self._arrive(number, arrival)
            if not self.batcher.has_work:
                if not queue:
                    break
                self.now_s = queue[0][0]
                continue
            if end_s and not queue and not drain:
                break
            hold_s = self.batcher.hold_s()
            if hold_s > 0:
                until_s = self.now_s + hold_s
                if queue and queue[0][0] < until_s:
                    self.outcome.held_s += queue[0][0] - self.now_s
                    self.now_s = queue[0][0]
                    continue
                self.outcome.held_s += hold_s
                self.now_s = until_s
            self._step()
        for sequence in self._live.values():
            self._judge(sequence)
        self.outcome.ended_s = self.now_s
        self.outcome.model_error = self.sizer.cost.error
        return self.outcome

    def _arrive(self, number: int, arrival: Arrival) -> None:
        params = SamplingParams(max_tokens=arrival.output_tokens)
        request = Request(
            request_id=str(number), prompt_ids=(0,) * arrival.prompt_tokens, params=params
        )
        sequence = Sequence(number, request, 0, None)
        sequence.arrived_s = arrival.at_s
        starts = self._routes.starts
        self._start_of[number] = int(starts[self._draw.integers(starts.size)])
        self.sizer.arrived(bool(self._live))
        self._live[number] = sequence
        self.batcher.add(sequence)

    def _step(self) -> None:
        batch = self.batcher.plan()
        plan = batch.plan
        rows = np.concatenate(
            [
                self._start_of[part.sequence_id]
                + np.arange(part.start, part.start + len(part.token_ids))
                for part in plan.parts
            ]
        )
        distinct, missing = self._routes.asked(rows)
        kv_tokens = sum(part.start + len(part.token_ids) for part in plan.parts)
        step_s = self._machine.step_s(rows.size, distinct, missing, kv_tokens)
        step_s *= float(np.exp(self._machine.noise * self._draw.standard_normal()))
        if self._draw.random() < self._machine.pause_share:
            step_s *= 3.0
        self.now_s += step_s
        if self.now_s >= self._counted_from_s:
            self.outcome.steps += 1
            self.outcome.tokens += rows.size
            self.outcome.distinct += distinct
        decode = sum(part.is_decode for part in plan.parts)
        features = StepFeatures(decode, rows.size - decode, distinct, missing, kv_tokens)
        self.sizer.learn(features, step_s)
        self.batcher.advance(batch)
        self._say(batch)

    def _say(self, batch: Batch) -> None:
        """One more token of each sequence whose logits came."""
        for part, sequence in zip(batch.plan.parts, batch.sequences, strict=True):
            if not part.wants_logits:
                continue
            sequence.token_ids.append(0)
            if sequence.first_token_s is None:
                sequence.first_token_s = self.now_s
            if sequence.generated >= sequence.request.params.max_tokens:
                self.batcher.remove(sequence)
                del self._live[sequence.sequence_id], self._start_of[sequence.sequence_id]
                self.outcome.done += 1
                self._judge(sequence)

    def _judge(self, sequence: Sequence) -> None:
        """Whether a sequence that ended, or is still here at the end, had its tokens in time."""
        if sequence.arrived_s < self._counted_from_s:
            return
        outcome = self.outcome
        first_s = sequence.first_token_s
        limit_s = self._objectives.ttft_ms / 1e3
        waited_s = (self.now_s if first_s is None else first_s) - sequence.arrived_s
        if first_s is not None or waited_s > limit_s:
            outcome.first_all += 1
            outcome.first_in_time += waited_s <= limit_s
        if first_s is not None and sequence.generated > 1:
            each_s = (self.now_s - first_s) / (sequence.generated - 1)
            outcome.rest_all += 1
            in_time = each_s <= self._objectives.tpot_ms / 1e3
            outcome.rest_in_time += in_time
            outcome.both_in_time += in_time and waited_s <= limit_s
