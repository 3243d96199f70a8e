"""What a supervisor knows of its replica, made into the report that dispatchers read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from core.step import RoutingSummary, StepStats
from deployments.live_request import LiveRequest
from deployments.replica_cost import ReplicaCost
from deployments.replica_report import ReplicaReport, domain_hash

_ANSWER_KEEP = 0.98
"""Weight of an ended answer beside the next one."""


class ReplicaNews:
    """Steps, idle reports and ended answers in, a `ReplicaReport` out."""

    def __init__(self, kv_block_tokens: int) -> None:
        self.max_sequences = 0
        """Of the rank's engine; 0 until it stands."""
        self._block_tokens = kv_block_tokens
        self._cost = ReplicaCost()
        self._stats = StepStats(step=0, step_s=0.0)
        self._routing: RoutingSummary | None = None
        self._served_tokens = 0
        self._told: list[float] = []
        self._told_stamped: list[float] = []
        self._answers = 0.0
        self._answer_tokens = 0.0

    def step(self, stats: StepStats) -> None:
        """One step of the rank."""
        self._cost.learn(stats)
        self._served_tokens += stats.decode_tokens + stats.prefill_tokens
        self.gauges(stats)

    def gauges(self, stats: StepStats) -> None:
        """How the rank stands, with or without a step."""
        self._stats = stats
        if stats.routing is not None:
            self._routing = stats.routing

    def asked(self) -> None:
        """A request came, whatever becomes of it: the next report has to differ."""
        self._served_tokens += 1

    def lost(self) -> None:
        """The rank is gone, and with it what its pool and its key and value blocks held."""
        self._stats = StepStats(step=0, step_s=0.0)
        self._routing = None
        self._served_tokens = 0

    def answered(self, sequences: int, tokens: int) -> None:
        """A request ended by itself after `tokens` tokens of all its sequences."""
        self._answers = _ANSWER_KEEP * self._answers + sequences
        self._answer_tokens = _ANSWER_KEEP * self._answer_tokens + tokens

    def floats(self, live: Iterable[LiveRequest], ready: bool, now_s: float) -> list[float]:
        """The report for Serve's controller; the last one, with its time, if nothing changed."""
        report = self.report(live, ready)
        unstamped = report.to_floats()
        if unstamped != self._told:
            self._told = unstamped
            self._told_stamped = replace(report, made_s=now_s).to_floats()
        return self._told_stamped

    def report(self, live: Iterable[LiveRequest], ready: bool) -> ReplicaReport:
        """As things stand, with the requests that are here."""
        sequences = prompt_tokens = 0
        for one in live:
            if not one.done:
                sequences += one.request.n
                if not one.started:
                    prompt_tokens += len(one.request.prompt_ids)
        stats, cost, routing = self._stats, self._cost, self._routing
        running = min(stats.running, sequences)
        blocks = stats.kv_blocks_total
        # The pool sees what it waits for; the fit only knows that steps with misses took longer.
        miss_s = routing.miss_s if routing is not None else cost.miss_s
        return ReplicaReport(
            ready=ready,
            served_tokens=self._served_tokens,
            running=running,
            waiting=sequences - running,
            prompt_tokens=prompt_tokens,
            kv_free_tokens=(blocks - stats.kv_blocks_used) * self._block_tokens,
            kv_tokens=blocks * self._block_tokens,
            max_sequences=self.max_sequences,
            step_s=cost.step_s,
            sequence_s=cost.sequence_s,
            prefill_token_s=cost.prefill_token_s,
            cold_token_s=cost.experts_a_token * miss_s,
            hit_rate=routing.hit_rate if routing is not None else cost.hit_rate,
            answer_tokens=self._answer_tokens / self._answers if self._answers else 0.0,
            domains={domain_hash(name): rate for name, rate in routing.hit_rate_by_domain.items()}
            if routing is not None
            else {},
        )
