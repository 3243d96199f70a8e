"""One replica without a model: the real batcher and the real pool's decisions, on known routing.

The batcher plans steps for sequences whose tokens are blanks; what experts a row chooses is read
from its document. `SimulatedPool` decides who is resident as the live pool does, without reading
ahead; `DomainPopularity` and `ReplicaNews` learn and report as in a server. How long a step takes
is reckoned by a `MachineModel`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.routed_requests import Document, RoutedRequest, distinct_of
from core.request import Request, SamplingParams
from core.step import PoolStepStats, RoutingSummary, StepStats
from deployments.replica_news import ReplicaNews
from deployments.replica_report import ReplicaReport
from deployments.settings import hand_over_limit
from engine.batcher import Batch, Batcher
from engine.coherent_admission import AdmissionOrder
from engine.kv_pages import KvPages
from engine.sequence import Sequence as EngineSequence
from expert_pool.domain_popularity import DomainPopularity, FloatArray, Label
from expert_pool.eviction_rules import EvictionRules
from expert_pool.expectations import LEARN_EVERY
from expert_pool.policies import make_policy
from expert_pool.routing_summary import routing_summary
from expert_pool.settings import PoolSettings
from expert_pool.simulated_pool import SimulatedPool
from expert_pool.tables import State, StateTable

BLOCK_TOKENS = 16
TELL_ROUTING_S = 1.0
"""How often a rank says where its experts lie, as the engine does."""
_FIRST_STEPS = 64
"""So many steps teach popularity, each of them; later one in LEARN_EVERY does."""


@dataclass(frozen=True, slots=True)
class MachineModel:
    """Seconds of a step: a constant, and what each row, distinct expert and missing expert adds."""

    step_s: float
    row_s: float
    expert_s: float
    miss_s: float

    def seconds(self, rows: int, distinct: int, misses: int) -> float:
        """Of one step; `distinct` and `misses` over all layers."""
        return self.step_s + self.row_s * rows + self.expert_s * distinct + self.miss_s * misses


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What all replicas have in common."""

    num_experts: int
    layers: int
    top_k: int
    slots: int
    """Experts of each layer that have a slot, at the start."""
    sequences: int
    machine: MachineModel
    max_step_tokens: int = 512
    hysteresis: float = PoolSettings().hysteresis
    policy: str = PoolSettings().policy
    max_overtakes: int | None = None
    """With it the waiting are admitted by how their experts overlap with the running ones."""


@dataclass(slots=True)
class Counts:
    """What one replica did; differences of two of them are what it did in between."""

    steps: int = 0
    rows: int = 0
    accesses: int = 0
    misses: int = 0
    busy_s: float = 0.0
    full_steps: int = 0
    """Steps with as many sequences as may run, one row of each."""
    full_accesses: int = 0

    def minus(self, before: Counts) -> Counts:
        """Field by field."""
        return Counts(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))

    def plus(self, other: Counts) -> Counts:
        """Field by field."""
        return Counts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is done: when it came, when its first step began, when it was over."""

    number: int
    arrived_s: float
    admitted_s: float
    ended_s: float


@dataclass(slots=True)
class _Live:
    """Has what `ReplicaNews` asks of a request in a supervisor."""

    routed: RoutedRequest
    request: Request
    sequence: EngineSequence | None = None
    """None while the batcher has not got it."""
    admitted_s: float | None = None
    done: bool = False

    @property
    def computed(self) -> int:
        return 0 if self.sequence is None else self.sequence.computed

    @property
    def started(self) -> bool:
        return self.computed >= self.routed.document.prompt_rows


class SimulatedReplica:
    """Takes requests, makes steps when told to. The clock is the simulation's."""

    def __init__(
        self, name: str, shape: ReplicaShape, most_rows: int, clock: Callable[[], float]
    ) -> None:
        """`most_rows`: of the longest document."""
        self.name = name
        self.shape = shape
        self.counts = Counts()
        self._clock = clock
        layers, experts, pool = shape.layers, shape.num_experts, PoolSettings()
        rules = EvictionRules(
            make_policy(shape.policy, layers, experts), layers, experts, shape.hysteresis
        )
        self.pool = SimulatedPool(
            [experts] * layers, [shape.top_k] * layers, [shape.slots] * layers, rules
        )
        memory = pool.popularity_memory * 7 // 8
        self.popularity = DomainPopularity(layers, experts, memory, pool.tenant_share)
        order = None
        if shape.max_overtakes is not None:
            sequences, most = shape.sequences, shape.max_overtakes
            order = AdmissionOrder(
                self._signature, most, clock, grouping="on", batch_sequences=sequences
            )
        self._blocks = shape.sequences * (-(-(most_rows + 1) // BLOCK_TOKENS) + 1)
        self.batcher = Batcher(
            KvPages(self._blocks, BLOCK_TOKENS),
            shape.sequences,
            max(shape.max_step_tokens, shape.sequences),
            order=order,
        )
        self._news = ReplicaNews(BLOCK_TOKENS)
        self._news.max_sequences = shape.sequences
        self._queue: deque[_Live] = deque()
        """What the supervisor keeps back."""
        self._handed: dict[int, _Live] = {}
        """What the batcher has, by sequence."""
        self._next_id = 0
        self._step: tuple[Batch, StepStats] | None = None
        self._routing_told_s = -math.inf

    @property
    def outstanding(self) -> int:
        """Requests that wait or run."""
        return len(self._queue) + len(self._handed)

    @property
    def outstanding_rows(self) -> int:
        """Rows that are still to pass: more than any server can know."""
        return sum(live.routed.document.rows - live.computed for live in self._all())

    def add(self, routed: RoutedRequest) -> None:
        """A request comes in."""
        document = routed.document
        answer = document.rows - document.prompt_rows + 1
        request = Request(
            request_id=str(routed.number),
            prompt_ids=(0,) * document.prompt_rows,
            params=SamplingParams(max_tokens=answer),
            domain=routed.label,
        )
        self._queue.append(_Live(routed, request))
        self._hand_over()

    def begin_step(self) -> float | None:
        """Seconds that the step which begins now takes; None where there is nothing to do."""
        if self._step is not None:
            raise RuntimeError("a step is under way")
        batch = self.batcher.plan()
        if not batch.plan.parts:
            return None
        passed: list[tuple[Document, slice]] = []
        for part in batch.plan.parts:
            live = self._handed[part.sequence_id]
            if live.admitted_s is None:
                live.admitted_s = self._clock()
            rows = slice(part.start, part.start + len(part.token_ids))
            passed.append((live.routed.document, rows))
        stats = self._pass(batch, passed)
        self._step = batch, stats
        return stats.step_s

    def end_step(self) -> list[Finished]:
        """The step is over: what is finished leaves."""
        if self._step is None:
            raise RuntimeError("no step is under way")
        (batch, stats), self._step = self._step, None
        self.batcher.advance(batch)
        if self.batcher.order is not None:
            distinct = stats.pool.demand_hits + stats.pool.demand_misses
            self.batcher.order.stepped(batch.sequences, batch.plan.num_tokens, distinct)
        finished = []
        for part, sequence in zip(batch.plan.parts, batch.sequences, strict=True):
            live = self._handed[sequence.sequence_id]
            document = live.routed.document
            if sequence.computed >= document.rows:
                self.batcher.remove(sequence)
                del self._handed[sequence.sequence_id]
                self._news.answered(1, live.request.params.max_tokens)
                number, came_s = live.routed.number, live.routed.at_s
                finished.append(Finished(number, came_s, live.admitted_s or 0.0, self._clock()))
            elif part.wants_logits:
                sequence.token_ids.append(0)
        self._hand_over()
        self._fill_gauges(stats)
        if self._clock() - self._routing_told_s >= TELL_ROUTING_S or not self._handed:
            self._routing_told_s = self._clock()
            stats.routing = self._routing()
        self._news.step(stats)
        return finished

    def report(self) -> ReplicaReport | None:
        """What a real one would send now, after its way through the numbers it is sent as."""
        report = self._news.report(self._all(), True)  # type: ignore[arg-type]
        return ReplicaReport.from_floats(replace(report, made_s=self._clock()).to_floats())

    def _pass(self, batch: Batch, passed: Sequence[tuple[Document, slice]]) -> StepStats:
        shape, pool, total = self.shape, self.pool, self.counts
        ids = np.concatenate([document.expert_ids[rows] for document, rows in passed])
        counts = distinct_of(ids, shape.num_experts)
        given = None
        if all(document.weights is not None for document, _ in passed):
            weights = [d.weights[rows] for d, rows in passed if d.weights is not None]
            given = _weight_sums(ids, np.concatenate(weights), shape.num_experts)
        rows, before, distinct = len(ids), pool.misses, 0
        for layer in range(shape.layers):
            experts = np.flatnonzero(counts[layer])
            if experts.size:
                distinct += experts.size
                share = None if given is None else given[layer, experts]
                pool.demand(layer, experts, counts[layer, experts], rows, share)
        pool.end_step()
        misses = pool.misses - before
        decoding = sum(part.is_decode for part in batch.plan.parts)
        stats = StepStats(
            step=total.steps,
            step_s=shape.machine.seconds(rows, distinct, misses),
            decode_tokens=decoding,
            prefill_tokens=rows - decoding,
            pool=PoolStepStats(demand_hits=distinct - misses, demand_misses=misses),
        )
        total.steps += 1
        total.rows += rows
        total.accesses += distinct
        total.misses += misses
        total.busy_s += stats.step_s
        if rows == len(batch.plan.parts) == shape.sequences:
            total.full_steps += 1
            total.full_accesses += distinct
        self._learn(batch, passed, counts)
        return stats

    def _learn(
        self, batch: Batch, passed: Sequence[tuple[Document, slice]], counts: npt.NDArray[np.int64]
    ) -> None:
        """As `expert_pool.expectations` does, so often; labels are believed."""
        steps, layers = self.counts.steps, self.shape.layers
        if steps <= _FIRST_STEPS or steps % LEARN_EVERY == 0:
            rows = float(sum(len(part.token_ids) for part in batch.plan.parts))
            self.popularity.learn_everyone(counts, np.full(layers, rows))
        prompts = any(not part.is_decode for part in batch.plan.parts)
        if not prompts and steps % LEARN_EVERY:
            return
        for part, (document, which) in zip(batch.plan.parts, passed, strict=True):
            if part.domain:
                own = distinct_of(document.expert_ids[which], self.shape.num_experts)
                tokens = np.full(layers, float(len(part.token_ids)))
                self.popularity.learn(Label("", part.domain, ""), own, tokens)

    def _routing(self) -> RoutingSummary:
        shape = self.shape
        states = StateTable([shape.num_experts] * shape.layers)
        states.state[self.pool.resident] = State.RESIDENT
        top_k = np.full(shape.layers, float(shape.top_k))
        return routing_summary(states, self.popularity, top_k, shape.machine.miss_s)

    def _signature(self, request: Request) -> FloatArray | None:
        return self.popularity.expected(Label(request.tenant, request.domain, request.session))

    def _hand_over(self) -> None:
        # As many whether it groups or not: order of arrival does not care who waits where.
        most = hand_over_limit(self.shape.sequences, grouping=True)
        while self._queue and len(self._handed) < most:
            live = self._queue.popleft()
            sequence = EngineSequence(self._next_id, live.request, 0, None)
            sequence.arrived_s = live.routed.at_s
            self._next_id += 1
            live.sequence = sequence
            self._handed[sequence.sequence_id] = live
            self.batcher.add(sequence)

    def _fill_gauges(self, stats: StepStats) -> None:
        stats.running, stats.waiting = len(self.batcher.running), len(self.batcher.waiting)
        stats.kv_blocks_total = self._blocks
        stats.kv_blocks_used = sum(len(s.block_ids) for s in self.batcher.running)

    def _all(self) -> list[_Live]:
        return [*self._handed.values(), *self._queue]


def _weight_sums(
    ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float32], num_experts: int
) -> npt.NDArray[np.float64]:
    layers = ids.shape[1]
    shifted = np.where(ids >= 0, ids + np.arange(layers)[None, :, None] * num_experts, 0)
    given = np.where(ids >= 0, weights, 0.0)
    sums: npt.NDArray[np.float64] = np.bincount(
        shifted.ravel(), given.ravel(), minlength=layers * num_experts
    ).astype(np.float64)
    return sums.reshape(layers, num_experts)
