"""What the pool expects of its traffic: by domain and session, of requests that are to come.

Here labels meet the router's choices. Learning is by sample, so that it costs little: all prompt
parts, every few decode steps, and everyone's use from the counts that are kept anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from core.step import PoolStepStats, RoutingSummary, SequencePart
from expert_pool.domain_popularity import MAX_NAME, DomainPopularity, FloatArray, Label
from expert_pool.label_judge import LabelJudge
from expert_pool.preload import Preloader
from expert_pool.routing_summary import MissCost, routing_summary
from expert_pool.step_rows import StepRows
from expert_pool.tables import IntArray

if TYPE_CHECKING:
    from expert_pool.pool import ExpertPool

LEARN_EVERY: Final = 8
"""Decode steps between two that teach popularity."""
_FIRST_STEPS: Final = 64
"""So many steps from the start teach everyone's popularity, each of them."""
_LABELS_LOOKED_AT: Final = 16
"""Of one step, for what it will ask for."""


class Expectations:
    """Belongs to one pool; its step thread calls it."""

    def __init__(self, pool: ExpertPool) -> None:
        settings, layers = pool.settings, pool.index.layers
        num_layers, num_experts = pool.loads.shape
        memory_bytes = settings.popularity_memory
        self.popularity = DomainPopularity(
            num_layers, num_experts, memory_bytes * 7 // 8, settings.tenant_share
        )
        self.judge = LabelJudge(self.popularity)
        self.preloader = Preloader(pool, settings.hints, settings.tenant_share)
        self.gathers = False
        """Whether `note` is to be called for what the step's rows choose."""
        self._pool = pool
        self._top_k = np.array([layer.top_k for layer in layers], np.float64)
        self._rows = StepRows(num_layers, num_experts, memory_bytes // 8)
        self._steps = 0
        self._learned_of: IntArray = np.zeros_like(pool.loads)
        self._labels: tuple[tuple[Label, int], ...] = ()
        self._mixed: tuple[tuple[tuple[Label, int], ...], int, FloatArray | None] = ((), 0, None)
        self._miss_cost = MissCost()
        self._wrong_before = 0
        if pool.usage is not None:
            self._take_over(pool)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables: the setting's for names, about 24 an expert besides."""
        mixed = self._mixed[2]
        own = self._learned_of.nbytes + (0 if mixed is None else mixed.nbytes)
        return self.popularity.nbytes + self._rows.nbytes + own

    def begin_step(self, parts: Sequence[SequencePart]) -> FloatArray | None:
        """What passes. Returns the rates to expect of it, [layers, experts]; None: everyone's."""
        self._steps += 1
        self.gathers = False
        labelled = [part for part in parts if part.domain or part.session]
        if not labelled:
            return None
        self.gathers = self.popularity.learns_names and (
            self._steps % LEARN_EVERY == 0 or not all(part.is_decode for part in labelled)
        )
        if self.gathers:
            self._rows.begin(parts, self._steps)
        if self._pool.read_ahead is None:
            return None
        found: Counter[Label] = Counter()
        for part in labelled[:_LABELS_LOOKED_AT]:
            found[self._believed(part)] += len(part.token_ids)
        self._labels = tuple(found.items())
        return self._mix()

    def note(self, layer: int, counts: IntArray, rows: IntArray) -> None:
        """As `StepRows.note`."""
        self._rows.note(layer, counts, rows)

    def demanded(self, layer: int, experts: IntArray) -> None:
        """A layer is asked for `experts`."""
        if self.preloader.is_waiting(layer):
            self.preloader.demanded(layer, experts)

    def end_step(self, stats: PoolStepStats) -> None:
        """Learns from the step; adds to its `stats`."""
        if self.gathers:
            self.gathers = False
            for part, counts in self._rows.take():
                self._learn(part, counts)
        if self._steps <= _FIRST_STEPS or self._steps % LEARN_EVERY == 0:
            fresh = self._pool.loads - self._learned_of
            if fresh.any():
                self._learned_of += fresh
                self.popularity.learn_everyone(fresh, fresh.sum(axis=1) / self._top_k)
        self._miss_cost.add(stats.demand_misses, stats.stall_s)
        stats.hints = self.preloader.take_stats()
        stats.hints.wrong_labels = self.judge.wrong - self._wrong_before
        self._wrong_before = self.judge.wrong
        usage = self._pool.usage
        if usage is not None and usage.is_due():
            self.save()

    def save(self) -> None:
        """Adds to what is kept on disk, and takes over what other replicas have added."""
        usage = self._pool.usage
        if usage is None:
            return
        if usage.save(self._pool.loads, self.popularity.fresh_by_domain()):
            self.popularity.forget_fresh()
        self._take_over(self._pool)

    def hint(self, domain: str, session: str, tenant: str, first_ids: Sequence[int]) -> None:
        """A request of this label will come."""
        label = _label(tenant, domain, session)
        if self.judge.doubts(label):
            label = label._replace(domain="")
        if self.preloader.follows(tenant):
            rates, everyone = self._expected(label, first_ids), self.popularity.of_everyone()
            if rates is not None and everyone is not None:
                # Texts of unlike domains may begin alike, and what begins is read for.
                self.preloader.begin(label, 0.5 * (rates + everyone))

    def signature(
        self, domain: str, session: str, tenant: str, first_ids: Sequence[int]
    ) -> FloatArray | None:
        """Expected rates of a request of this label. Not to be written."""
        label = _label(tenant, domain, session)
        rates = self._expected(label, first_ids)
        return self.popularity.expected(label) if rates is None else rates

    def summary(self) -> RoutingSummary:
        """Where experts lie, for whoever chooses a replica."""
        return routing_summary(
            self._pool.residency.states, self.popularity, self._top_k, self._miss_cost.seconds
        )

    def _believed(self, part: SequencePart) -> Label:
        label = _label(part.tenant, part.domain, part.session)
        if label.domain and not self.judge.believes(part.sequence_id):
            label = label._replace(domain="")
        return label

    def _learn(self, part: SequencePart, counts: IntArray) -> None:
        label = _label(part.tenant, part.domain, part.session)
        tokens: npt.NDArray[np.float64] = counts.sum(axis=1) / self._top_k
        if label.domain:
            wrong = self.judge.wrong
            self.judge.look(part.sequence_id, label, counts, tokens)
            if self.judge.wrong > wrong:
                self.preloader.drop(label)
            if not self.judge.teaches(part.sequence_id, label):
                label = label._replace(domain="")
        self.popularity.learn(label, counts, tokens)

    def _expected(self, label: Label, first_ids: Sequence[int]) -> FloatArray | None:
        """By domain and session, else by how the prompt begins; None where neither is known."""
        if self.popularity.knows(label):
            return self.popularity.expected(label)
        ahead = self._pool.read_ahead
        if ahead is None or not first_ids:
            return None
        return ahead.prefetcher.forecaster.expected_of_prompt(first_ids)

    def _mix(self) -> FloatArray | None:
        labels, since, mixed = self._mixed
        if labels == self._labels and self._steps - since < LEARN_EVERY:
            return mixed
        mixed = None
        total = sum(rows for _, rows in self._labels)
        for label, rows in self._labels:
            rates = self.popularity.expected(label)
            if rates is not None:
                part = rates * np.float32(rows / total)
                mixed = part if mixed is None else np.add(mixed, part, out=mixed)
        self._mixed = (self._labels, self._steps, mixed)
        return mixed

    def _take_over(self, pool: ExpertPool) -> None:
        known = None if pool.usage is None else pool.usage.known()
        if known is not None:
            self.popularity.replace_earlier(known.everyone, known.domains)


def _label(tenant: str, domain: str, session: str) -> Label:
    if len(session) > MAX_NAME:  # conversations that begin alike are not one
        session = f"{session[:MAX_NAME]} {hash(session)}"
    return Label(tenant, domain[:MAX_NAME], session)
