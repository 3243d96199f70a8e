"""What the routers of this process counted, for the gateway's status and its metrics.

Serve makes the routers, from a copy of their module; they make themselves known here.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

PREFIX = "dispatch_"


class DispatchCounts:
    """Counters that only grow."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        """Requests by the rule that chose their replica."""
        self.cost_s = 0.0
        """Sum of what was expected where the rule was cost, in seconds."""
        self.best_hit_rate = 0
        """Requests by cost that fell on a replica with the highest expected hit rate."""
        self.unreadable_reports = 0
        self.errors = 0
        """Choices left to Serve's order because the dispatcher failed."""
        self.elsewhere = 0
        """Requests that Serve gave to another replica than the one chosen."""


_OF_THIS_PROCESS: dict[str, DispatchCounts] = {}


def counts_of(deployment: str) -> DispatchCounts:
    """The counters of one deployment's routers in this process."""
    return _OF_THIS_PROCESS.setdefault(deployment, DispatchCounts())


def dispatch_status() -> dict[str, float]:
    """All of them together, as plain numbers by name; nothing where nothing was dispatched."""
    status: defaultdict[str, float] = defaultdict(float)
    for counts in list(_OF_THIS_PROCESS.values()):
        status[f"{PREFIX}decisions"] += counts.reasons.total()
        for reason, count in list(counts.reasons.items()):
            status[f"{PREFIX}by_{_word(reason)}"] += count
        status[f"{PREFIX}cost_s"] += counts.cost_s
        status[f"{PREFIX}best_hit_rate"] += counts.best_hit_rate
        status[f"{PREFIX}unreadable_reports"] += counts.unreadable_reports
        status[f"{PREFIX}errors"] += counts.errors
        status[f"{PREFIX}elsewhere"] += counts.elsewhere
    return dict(status)


def dispatch_page() -> bytes:
    """The same in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Counted())
    return generate_latest(registry)


class _Counted:
    def collect(self) -> list[CounterMetricFamily]:
        """One family a counter."""
        gateway = str(os.getpid())
        counted = list(_OF_THIS_PROCESS.items())
        requests = CounterMetricFamily(
            "coterie_dispatch_requests",
            "Requests by the rule that chose their replica.",
            labels=(*_LABELS, "reason"),
        )
        families = [requests]
        for deployment, counts in counted:
            for reason, count in list(counts.reasons.items()):
                requests.add_metric((deployment, gateway, reason), count)
        for name, (key, text) in _METRICS.items():
            family = CounterMetricFamily(f"coterie_dispatch_{name}", text, labels=_LABELS)
            for deployment, counts in counted:
                family.add_metric((deployment, gateway), getattr(counts, key))
            families.append(family)
        return families


_LABELS = ("deployment", "gateway")
_METRICS = {
    "expected_seconds": ("cost_s", "Sum of the expected cost of requests placed by cost."),
    "best_hit_rate": ("best_hit_rate", "Requests placed by cost where most experts were likely."),
    "unreadable_reports": ("unreadable_reports", "Reports of replicas that made no sense."),
    "errors": ("errors", "Choices left to Serve because the dispatcher failed."),
    "elsewhere": ("elsewhere", "Requests that Serve gave to another replica than the chosen."),
}


def _word(reason: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in reason.lower()).split())
