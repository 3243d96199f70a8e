"""A fake engine whose pool holds the experts of few domains, and whose steps cost what they miss.

What is computed is FakeEngine's. A domain's hit rate grows with its share of the tokens served
last, so two replicas that each serve one domain are faster than two that serve both.
"""

from __future__ import annotations

import time
from typing import Any

from core.request import Request
from core.step import PoolStepStats, RoutingSummary, StepResult, StepStats
from tests.serving.fake_engines import CRASH, FakeEngine

EXPERTS = 20
"""Asked for by each token."""
HELD = 1.0
"""Sum over the domains of their hit rates."""
KEEP = 0.98
"""Weight of a token served beside the next one."""

HINTS: list[dict[str, Any]] = []
"""What engines of this process were told ahead."""


class DomainEngine(FakeEngine):
    """A step takes `step_ms` and `miss_ms` for each miss; a domain's hit rate is its share."""

    def __init__(self, max_sequences: int, step_ms: float, miss_ms: float) -> None:
        super().__init__(max_sequences, 100_000, 100_000)
        self.step_s, self.miss_s = step_ms / 1000, miss_ms / 1000
        self.shares: dict[str, float] = {}
        self.prefilled: set[str] = set()

    def hint(self, **labels: Any) -> None:
        HINTS.append(labels)

    def rate(self, domain: str) -> float:
        total = sum(self.shares.values())
        return HELD * self.shares.get(domain, 0.0) / total if total else 0.0

    def step(self) -> StepResult:
        while self.waiting and len(self.running) < self.max_sequences:
            self.running.append(self.waiting.pop(0))
        requests: list[Request] = [sequence.request for sequence in self.running]
        if any(request.params.seed == CRASH for request in requests):
            return super().step()
        missing = sum(EXPERTS * (1 - self.rate(request.domain)) for request in requests)
        began = time.monotonic()
        fresh = [request for request in requests if request.request_id not in self.prefilled]
        self.prefilled |= {request.request_id for request in fresh}
        tokens = sum(len(request.prompt_ids) for request in fresh)
        time.sleep(self.step_s + missing * self.miss_s + tokens * self.step_s / 1000)
        result = super().step()
        for request in requests:
            self.shares = {name: KEEP * share for name, share in self.shares.items()}
            self.shares[request.domain] = self.shares.get(request.domain, 0.0) + 1.0
        stats = result.stats
        stats.step_s = time.monotonic() - began
        stats.decode_tokens = len(requests) - len(fresh)
        stats.prefill_tokens = tokens
        stats.pool = PoolStepStats(
            demand_hits=round(EXPERTS * len(requests) - missing), demand_misses=round(missing)
        )
        stats.routing = self.summary()
        return result

    def gauges(self) -> StepStats:
        stats = super().gauges()
        stats.routing = self.summary()
        return stats

    def summary(self) -> RoutingSummary:
        rates = {name: self.rate(name) for name in self.shares if name}
        total = sum(self.shares.values())
        mean = sum(share * self.rate(name) for name, share in self.shares.items())
        return RoutingSummary(
            hit_rate=mean / total if total else 0.0,
            hit_rate_by_domain=rates,
            miss_s=self.miss_s,
        )


def open_engine(settings: dict[str, Any]) -> DomainEngine:
    engine = settings["engine"]
    return DomainEngine(
        int(engine.get("max_sequences", 4)),
        float(engine.get("step_ms", 2.0)),
        float(engine.get("miss_ms", 0.2)),
    )
