"""What a gateway sent counts until a report shows it, and a report shows only what had arrived."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from deployments.replica_report import ReplicaReport
from deployments.sent_requests import SentRequests
from tests.deployments.test_dispatcher import ASK, IDLE, Clock, dispatcher

LAG_S = 0.02


def test_a_request_on_its_way_is_in_no_report() -> None:
    sent = SentRequests(LAG_S)
    slow, fast = (sent.sent("a", 1, 10, now_s=0.0) for _ in range(2))
    sent.arrived(fast, 0.01)
    sent.reported("a", made_s=0.2)
    assert (sent.of("a").unseen, sent.of("a").unseen_prompt_tokens) == (1, 10)
    assert sent.arrived(slow, 0.25)
    sent.reported("a", made_s=0.26)
    assert sent.of("a").unseen == 1, "clocks may differ by the lag"
    sent.reported("a", made_s=0.5)
    assert (sent.of("a").unseen, sent.of("a").open) == (0, 2)


def test_an_arrival_is_told_once_and_of_no_unknown_ticket() -> None:
    sent = SentRequests(LAG_S)
    ticket = sent.sent("a", 1, 10, now_s=0.0)
    assert sent.arrived(ticket, 0.1) and not sent.arrived(ticket, 0.2)
    sent.ended(ticket, 0.3)
    assert not sent.arrived(ticket, 0.4) and not sent.arrived(99, 0.4)


def test_one_whose_arrival_nobody_tells_is_not_counted_twice_for_ever() -> None:
    sent = SentRequests(LAG_S)
    sent.sent("a", 1, 10, now_s=0.0)
    sent.reported("a", made_s=0.9)
    assert sent.of("a").unseen == 1
    sent.reported("a", made_s=1.1)
    assert sent.of("a").unseen == 0 and sent.of("a").first_unseen_s is None


def burst(reports: dict[str, ReplicaReport], requests: int = 56, gateways: int = 1) -> Counter[str]:
    """Where requests go that come at once, while a report of an empty replica overtakes them."""
    clock = Clock()
    made = [dispatcher(clock, seed) for seed in range(gateways)]
    placed: Counter[str] = Counter()
    for one in made:
        for name, report in reports.items():
            one.report(name, report)
    for number in range(requests):
        one = made[number % gateways]
        ask = replace(ASK, prompt_tokens=5 + number % 7, max_tokens=5 + number % 5)
        name = one.choose(ask, ("a", "b")).replicas[0]
        one.sent(name, ask)
        placed[name] += 1
        clock.now_s += 0.005
        if number == requests // 2:
            for each in made:  # made now, when nothing of the burst has arrived
                each.report("a", replace(reports["a"], made_s=clock.now_s, served_tokens=100_001))
    return placed


@pytest.mark.parametrize("gateways", [1, 2])
def test_a_burst_at_idle_replicas_is_shared_evenly(gateways: int) -> None:
    placed = burst({"a": IDLE, "b": IDLE}, gateways=gateways)
    assert abs(placed["a"] - placed["b"]) <= gateways, placed


def test_a_replica_that_never_reported_gets_its_share_of_a_burst_and_no_more() -> None:
    """New, or of another version: its places are taken to be as many as the others'."""
    small = replace(IDLE, max_sequences=4, step_s=0.05, sequence_s=0.0, cold_token_s=0.0)
    placed = burst({"a": small}, requests=28)
    assert abs(placed["a"] - placed["b"]) <= 2, placed
