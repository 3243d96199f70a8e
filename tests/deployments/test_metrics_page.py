"""/metrics: what supervisors count, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from core.step import HintStats, PoolStepStats, PrefetchStats, StepStats
from deployments.metrics_page import ReplicasStatus, metrics_page
from deployments.step_totals import StepTotals


def samples_of(page: bytes) -> dict[tuple[str, str, str], float]:
    """(name, replica, tier or outcome) to value."""
    return {
        (x.name, x.labels["replica"], x.labels.get("tier") or x.labels.get("outcome", "")): x.value
        for family in text_string_to_metric_families(page.decode())
        for x in family.samples
    }


def page_of(*statuses: dict[str, float]) -> bytes:
    return metrics_page([ReplicasStatus("m", "", statuses)])


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
    page = page_of({"pid": 7, "running": 3, **totals.as_dict()})
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
    page = page_of({"pid": 1, "steps": 4}, {"pid": 2, "steps": 6})
    found = samples_of(page)
    assert found["coterie_steps_total", "1", ""] == 4
    assert found["coterie_steps_total", "2", ""] == 6


def test_several_models_are_one_page_with_one_family_a_metric() -> None:
    page = metrics_page(
        [
            ReplicasStatus("a", "", [{"pid": 1, "steps": 4}]),
            ReplicasStatus("b", "", [{"pid": 2, "steps": 6}]),
        ]
    )
    families = [family.name for family in text_string_to_metric_families(page.decode())]
    assert len(families) == len(set(families))
    assert b'coterie_steps_total{model_name="a",replica="1"} 4.0' in page
    assert b'coterie_steps_total{model_name="b",replica="2"} 6.0' in page


def test_groups_have_a_label_where_there_are_any() -> None:
    page = metrics_page(
        [
            ReplicasStatus("a", "", [{"pid": 1, "steps": 4}]),
            ReplicasStatus("a", "gpu2", [{"pid": 2, "steps": 6}]),
        ]
    )
    assert b'coterie_steps_total{group="",model_name="a",replica="1"} 4.0' in page
    assert b'coterie_steps_total{group="gpu2",model_name="a",replica="2"} 6.0' in page
    assert (
        b'coterie_expert_accesses_total{group="gpu2",model_name="a",replica="2",tier="slot"}'
        in page
    )


def test_without_a_replica_the_page_is_valid_and_empty() -> None:
    assert samples_of(page_of()) == {}


def test_a_step_that_was_idle_counts_nothing() -> None:
    totals = StepTotals()
    before = totals.as_dict()
    totals.add(StepStats(step=0, step_s=0.0))
    assert totals.as_dict() == before
    assert not any(before.values())


def test_recall_is_there_where_it_is_known_and_kept_until_it_is_told_anew() -> None:
    totals = StepTotals()
    prefetch = PrefetchStats(state="on", recall={"gate": 0.9, "popularity": 0.5})
    totals.add(StepStats(step=1, step_s=0.1, pool=PoolStepStats(prefetch=prefetch)))
    totals.add(StepStats(step=2, step_s=0.1))
    page = page_of({"pid": 7, **totals.as_dict()}, {"pid": 8})
    found = {
        (x.labels["replica"], x.labels["predictor"]): x.value
        for family in text_string_to_metric_families(page.decode())
        for x in family.samples
        if x.name == "coterie_prefetch_recall"
    }
    assert found == {("7", "gate"): 0.9, ("7", "popularity"): 0.5}


def test_what_came_of_hints_adds_up() -> None:
    totals = StepTotals()
    hints = HintStats(state="on", received=3, begun=5, useful=2, wasted=1, dropped=1)
    for step in (1, 2):
        totals.add(StepStats(step=step, step_s=0.1, pool=PoolStepStats(hints=hints)))
    found = samples_of(page_of({"pid": 7, **totals.as_dict()}))
    outcomes = ("begun", "useful", "wasted", "regretted", "dropped")
    counted = [found["coterie_hint_experts_total", "7", outcome] for outcome in outcomes]
    assert counted == [10, 4, 2, 0, 2]
    assert found["coterie_hints_total", "7", ""] == 6
    assert found["coterie_hints_on", "7", ""] == 1
