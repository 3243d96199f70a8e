"""/metrics: what supervisors count, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from core.step import PoolStepStats, PrefetchStats, StepStats
from deployments.metrics_page import metrics_page
from deployments.step_totals import StepTotals


def samples_of(page: bytes) -> dict[tuple[str, str, str], float]:
    """(name, replica, tier or outcome) to value."""
    return {
        (x.name, x.labels["replica"], x.labels.get("tier") or x.labels.get("outcome", "")): x.value
        for family in text_string_to_metric_families(page.decode())
        for x in family.samples
    }


def step(hits: int, disk: int, host: int) -> StepStats:
    pool = PoolStepStats(
        demand_hits=hits,
        demand_misses=disk + host,
        disk_misses=disk,
        host_misses=host,
        records_read=disk + 7,  # with those that were read ahead
        bytes_read=disk * 100,
        host_records=host,
        host_bytes=host * 100,
        resident=hits + disk + host,
        prefetch=PrefetchStats(state="on", used_bytes=300, wasted_bytes=100),
    )
    return StepStats(step=1, step_s=0.5, decode_tokens=2, pool=pool)


def test_hits_by_tier_prefetched_bytes_and_residents_are_there() -> None:
    """MoE-Infinity#31."""
    totals = StepTotals()
    totals.add(step(5, 2, 1))
    totals.add(step(6, 1, 1))
    page = metrics_page("m", [{"pid": 7, "running": 3, **totals.as_dict()}])
    found = samples_of(page)
    accesses = {tier: found["coterie_expert_accesses_total", "7", tier] for tier in TIERS}
    assert accesses == {"slot": 11, "host": 2, "disk": 3}
    assert found["coterie_prefetch_bytes_total", "7", "useful"] == 600
    assert found["coterie_prefetch_bytes_total", "7", "wasted"] == 200
    assert found["coterie_experts_resident", "7", ""] == 8
    assert found["coterie_num_requests_running", "7", ""] == 3
    assert found["coterie_step_seconds_total", "7", ""] == 1.0


TIERS = ("slot", "host", "disk")


def test_each_replica_has_its_own_samples() -> None:
    page = metrics_page("m", [{"pid": 1, "steps": 4}, {"pid": 2, "steps": 6}])
    found = samples_of(page)
    assert found["coterie_steps_total", "1", ""] == 4
    assert found["coterie_steps_total", "2", ""] == 6


def test_without_a_replica_the_page_is_valid_and_empty() -> None:
    assert samples_of(metrics_page("m", [])) == {}


def test_a_step_that_was_idle_counts_nothing() -> None:
    totals = StepTotals()
    before = totals.as_dict()
    totals.add(StepStats(step=0, step_s=0.0))
    assert totals.as_dict() == before
    assert not any(before.values())
