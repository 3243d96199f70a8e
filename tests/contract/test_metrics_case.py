"""/metrics of a running service whose experts do not all fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.settings import ServingSettings
from tests.serving.http_client import post
from tests.serving.local_server import MODEL, LocalServer

DEMO_MODEL = Path(__file__).parents[2] / "demo_model"
ENGINE = {"max_sequences": 2, "kv_memory": "16MiB", "threads": 1}
POOL = {"expert_memory": "40%", "hot_start_s": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    factory = "engine.engine:open_engine"
    with LocalServer(DEMO_MODEL, ServingSettings(), ENGINE, factory, POOL) as running:
        yield running


def metrics(server: LocalServer) -> dict[str, float]:
    """By name and last label."""
    page = httpx.get(server.url + "/metrics")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/plain")
    return {
        ":".join([sample.name, *map(str, sorted(set(sample.labels) - {"model_name", "replica"}))])
        + "".join(f"={sample.labels[k]}" for k in ("tier", "outcome") if k in sample.labels): (
            sample.value
        )
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }


def test_m21_hits_by_tier_prefetched_bytes_and_residents(server: LocalServer) -> None:
    """MoE-Infinity#31: what the cache does was visible nowhere."""
    before = metrics(server)
    body = {"model": MODEL, "prompt": "Once upon a time, there was", "max_tokens": 24, "seed": 1}
    answer = post(server.url, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    after = metrics(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    tier = "coterie_expert_accesses_total:tier="
    accesses = {name: grown[tier + name] for name in ("slot", "host", "disk")}
    steps = grown["coterie_steps_total"]
    assert steps >= 24
    # Six layers; a decode step asks four experts of each.
    assert accesses["slot"] > 0 and accesses["host"] + accesses["disk"] > 0
    assert sum(accesses.values()) >= 6 * 4 * 23
    # Whatever was read ahead, each expert asked for came from one tier.
    missed = grown["coterie_expert_misses_total"]
    assert accesses["host"] + accesses["disk"] == missed
    assert sum(accesses.values()) == accesses["slot"] + missed
    assert 0 < after["coterie_experts_resident"] <= 0.4 * 6 * 32 + 6
    for outcome in ("useful", "wasted"):
        assert after[f"coterie_prefetch_bytes_total:outcome={outcome}"] >= 0
    assert grown["coterie_generation_tokens_total"] == answer.json()["usage"]["completion_tokens"]
    assert after["coterie_num_requests_running"] == 0
