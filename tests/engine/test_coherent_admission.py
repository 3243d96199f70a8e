"""Who is admitted next: by overlap, and never at the cost of waiting without bound."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.request import Priority, Request, SamplingParams
from engine.coherent_admission import AdmissionOrder
from expert_pool.routing_trace import RoutingTrace
from tests.engine.grouping_simulation import (
    documents_of,
    exponential_arrivals,
    simulate,
    synthetic_documents,
)

LIKES = {"left": [1.0, 1.0, 0.0, 0.0], "right": [0.0, 0.0, 1.0, 1.0], "both": [0.5, 0.5, 0.5, 0.5]}


def signature(request: Request) -> np.ndarray | None:
    liked = LIKES.get(request.domain)
    return None if liked is None else np.array([liked] * 2, dtype=np.float32)


@dataclass
class Waiting:
    sequence_id: int
    domain: str = "left"
    priority: Priority = "interactive"
    generated: int = 0
    arrived_s: float = 0.0
    deadline_s: float | None = None
    name: str = ""
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        self.request = Request(
            request_id=self.name or str(self.sequence_id),
            prompt_ids=(1,),
            params=SamplingParams(max_tokens=1),
            priority=self.priority,
            domain=self.domain,
        )


def order(now_s: float = 0.0, most: int = 3, **more) -> AdmissionOrder:
    return AdmissionOrder(signature, most, lambda: now_s, more.pop("grouping", "on"), **more)


RUNNING = [Waiting(0, "left"), Waiting(1, "left")]


def test_the_oldest_that_adds_least_is_next() -> None:
    waiting = [Waiting(n, d) for n, d in enumerate(("right", "both", "left", "left"), start=2)]
    assert order().pick(waiting, RUNNING) == 2
    assert order().pick(waiting[:2], RUNNING) == 1
    assert order().pick(waiting, []) == 0
    assert order(grouping="off").pick(waiting, RUNNING) == 0


def test_equal_and_unknown_ones_go_in_order_of_arrival() -> None:
    same = [Waiting(n, "both") for n in range(2, 9)]
    assert order().pick(same, RUNNING) == 0
    unknown = [Waiting(n, "") for n in range(2, 9)]
    assert order().pick(unknown, RUNNING) == 0
    assert order().pick(same, [Waiting(0, "")]) == 0
    # Of whom nothing is known counts as the mean of the others.
    assert order().pick([Waiting(2, "right"), Waiting(3, ""), Waiting(4, "left")], RUNNING) == 2
    assert order().pick([Waiting(2, ""), Waiting(3, "right")], RUNNING) == 0


def test_who_was_overtaken_often_enough_goes_first_whatever_it_uses() -> None:
    asked = order(most=2)
    waiting = [Waiting(2, "right"), *(Waiting(n, "left") for n in range(3, 8))]
    admitted = []
    for _ in range(3):
        chosen = waiting[asked.pick(waiting, RUNNING)]
        asked.admitted(chosen, waiting)
        waiting.remove(chosen)
        admitted.append(chosen.sequence_id)
    assert admitted == [3, 4, 2]
    assert asked.take_overtaken() == 2
    assert asked.take_overtaken() == 0
    assert asked.overtaken(2) == 2
    asked.left(2)
    assert asked.overtaken(2) == 0


def test_interactive_requests_pass_batch_ones_but_not_for_ever() -> None:
    asked = order(most=2, grouping="auto")
    waiting = [Waiting(2, "left", "batch"), *(Waiting(n, "right") for n in range(3, 8))]
    admitted = []
    for _ in range(4):
        chosen = waiting[asked.pick(waiting, RUNNING)]
        asked.admitted(chosen, waiting)
        waiting.remove(chosen)
        admitted.append(chosen.sequence_id)
    assert admitted == [3, 4, 2, 5]


def test_who_ran_before_and_who_shares_a_running_prompt_go_before_others() -> None:
    waiting = [Waiting(2, "left"), Waiting(3, "right", name="shared"), Waiting(4, "right")]
    assert order().pick(waiting, [*RUNNING, Waiting(9, "left", name="shared")]) == 1
    waiting[2].generated = 1
    assert order().pick(waiting, [*RUNNING, Waiting(9, "left", name="shared")]) == 2


def test_the_oldest_goes_first_while_its_first_token_may_still_be_in_time() -> None:
    waiting = [Waiting(2, "right", arrived_s=10.0), Waiting(3, "left", arrived_s=11.0)]
    for now_s, expected in ((11.0, 1), (11.4, 1), (11.6, 0), (11.9, 0), (12.1, 1)):
        assert order(now_s, ttft_s=2.0).pick(waiting, RUNNING) == expected
    assert order(11.6).pick(waiting, RUNNING) == 1
    waiting[0].deadline_s = 14.0
    for now_s, expected in ((12.5, 1), (13.5, 0)):
        assert order(now_s).pick(waiting, RUNNING) == expected


def test_signatures_of_any_kind_do_no_harm() -> None:
    strange = {
        "nan": np.full((2, 4), np.nan),
        "large": np.full((2, 4), 7.0),
        "zero": np.zeros((2, 4)),
        "left": np.array([LIKES["left"]] * 2),
    }
    asked = AdmissionOrder(lambda request: strange[request.domain], 3, lambda: 0.0, "on")
    waiting = [Waiting(2, "nan"), Waiting(3, "zero"), Waiting(4, "large"), Waiting(5, "left")]
    assert asked.pick(waiting, [*RUNNING, Waiting(6, "large"), Waiting(7, "nan")]) in range(4)
    assert asked.pick(waiting, RUNNING) == 3


def test_many_layers_and_experts_are_thinned_out() -> None:
    draw = np.random.default_rng(0)
    likes = {name: draw.random((94, 512)) < 0.05 for name in ("left", "right")}
    asked = AdmissionOrder(lambda request: likes[request.domain], 3, lambda: 0.0, "on")
    assert asked.pick([Waiting(2, "right"), Waiting(3, "left")], RUNNING) == 1
    known = asked._overlap._known.values()
    assert all(kept is not None and kept.size <= 8192 for kept in known)


class Admissions(RuleBasedStateMachine):
    """Arrivals, cancellations, preemptions and ends as they come; the order admits."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.most = 0
        self.serial = 0
        self.running: list[Waiting] = []
        self.waiting: list[Waiting] = []
        self.held: set[int] = set()
        self.passed: dict[int, int] = {}
        self.tell_apart = False
        self.begin("on", 2, 3)

    def begin(self, grouping, most: int, places: int) -> None:
        self.places = places
        self.most = most
        self.order = AdmissionOrder(
            signature, most, lambda: self.now_s, grouping, ttft_s=5.0, batch_sequences=places
        )

    @precondition(lambda self: not self.serial)
    @rule(
        grouping=st.sampled_from(["on", "auto", "off"]),
        most=st.integers(0, 6),
        places=st.integers(1, 5),
    )
    def choose_settings(self, grouping, most: int, places: int) -> None:
        self.begin(grouping, most, places)

    @rule(
        domains=st.lists(st.sampled_from(["left", "right", "both", ""]), min_size=1, max_size=6),
        priority=st.sampled_from(["interactive", "interactive", "batch"]),
        seconds=st.floats(0, 3),
    )
    def arrive(self, domains: list[str], priority: Priority, seconds: float) -> None:
        self.now_s += seconds
        for domain in domains:
            self.serial += 1
            member = Waiting(self.serial, domain, priority, arrived_s=self.now_s)
            self.waiting.append(member)
            self.passed[member.sequence_id] = 0
            self.tell_apart = self.tell_apart or domain != "left" or priority != "interactive"

    @rule(which=st.integers(0, 20))
    def hold_or_let_go(self, which: int) -> None:
        if self.waiting:
            self.held ^= {self.waiting[which % len(self.waiting)].sequence_id}

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        everybody = self.waiting + self.running
        if everybody:
            self.leave(everybody[which % len(everybody)])

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        youngest = max(self.running, key=lambda member: member.sequence_id)
        self.running.remove(youngest)
        youngest.generated += 1
        self.waiting.append(youngest)
        self.waiting.sort(key=lambda member: member.sequence_id)

    @precondition(lambda self: self.waiting)
    @rule(ends=st.integers(0, 5))
    def step(self, ends: int) -> None:
        self.admit()
        self.order.stepped(self.running, len(self.running), 5 * len(self.running))
        for member in self.running[:ends]:
            self.leave(member)

    def admit(self) -> None:
        while len(self.running) < self.places:
            able = [m for m in self.waiting if m.sequence_id not in self.held]
            if not able:
                return
            at = self.order.pick(able, self.running)
            assert self.order.pick(able, self.running) == at, "asking changes the answer"
            if not (self.tell_apart or self.held or any(m.generated for m in able)):
                assert at == 0, "equal ones do not go in order of arrival"
            chosen = able[at]
            self.order.admitted(chosen, able)
            for member in able[:at]:
                self.passed[member.sequence_id] += 1
            self.waiting.remove(chosen)
            self.running.append(chosen)

    def leave(self, member: Waiting) -> None:
        for members in (self.waiting, self.running):
            if member in members:
                members.remove(member)
        self.held.discard(member.sequence_id)
        self.order.left(member.sequence_id)

    @invariant()
    def nobody_is_overtaken_more_often_than_the_setting_says(self) -> None:
        assert max(self.passed.values(), default=0) <= self.most

    def teardown(self) -> None:
        """A flood of younger ones does not keep the oldest waiting."""
        self.held.clear()
        oldest = self.waiting[0] if self.waiting else None
        for _ in range(len(self.waiting) + self.most + 1):
            for member in list(self.running):
                self.leave(member)
            self.arrive(["left", "left"], "interactive", 0.0)
            self.places = 1
            self.admit()
        assert oldest not in self.waiting
        for member in self.waiting + self.running:
            self.order.left(member.sequence_id)
        overlap = self.order._overlap
        assert not (overlap._known or self.order._overtaken or self.order._by_choice)


TestAdmissions = Admissions.TestCase
TestAdmissions.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("places", "least"), [(8, 0.1), (16, 0.08)])
def test_grouping_saves_experts_and_nobody_waits_longer(places: int, least: float) -> None:
    documents = synthetic_documents(taste=1.5)
    arrivals = exponential_arrivals(800, seed=1)
    in_order = simulate(documents, places, 1.1, arrivals, grouping="off", max_overtakes=32)
    grouped = simulate(documents, places, 1.1, arrivals, grouping="on", max_overtakes=32)
    assert 1 - grouped.distinct / in_order.distinct >= least
    assert grouped.queue_p95_s <= 1.1 * in_order.queue_p95_s
    assert (in_order.most_overtaken, grouped.most_overtaken) == (0, 32)


def test_it_finds_by_itself_that_it_pays_and_that_it_does_not() -> None:
    arrivals = exponential_arrivals(800, seed=1)
    alike = synthetic_documents(taste=0.0)
    found = simulate(alike, 8, 1.1, arrivals, grouping="auto", max_overtakes=32)
    assert set(found.states) == {"probing", "off"}
    apart = synthetic_documents(taste=1.5)
    in_order = simulate(apart, 8, 1.1, arrivals, grouping="off", max_overtakes=32)
    found = simulate(apart, 8, 1.1, arrivals, grouping="auto", max_overtakes=32)
    assert set(found.states) == {"probing", "on"}
    assert 1 - found.distinct / in_order.distinct >= 0.08


@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set")
def test_recorded_routing_with_real_arrivals_is_grouped_within_its_latency() -> None:
    """Two domains mixed; even batches of one domain alone ask for only 5 % fewer experts here."""
    data = Path(os.environ["COTERIE_DATA"])
    documents = []
    for name in ("intent", "law"):
        trace = RoutingTrace.read(data / "routing" / f"esft_lite_{name}.npz")
        documents += documents_of(trace, name)
    with (data / "traces" / "azure2023_conv.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))[:700]
    arrivals = np.array([float(row["arrival_s"]) for row in rows])
    lengths = np.clip([int(row["output_tokens"]) for row in rows], 8, 128)
    outcomes = [
        simulate(documents, 8, 1.1, arrivals, lengths, grouping=grouping, max_overtakes=32)
        for grouping in ("off", "on")
    ]
    assert 1 - outcomes[1].distinct / outcomes[0].distinct >= 0.015
    assert outcomes[1].queue_p95_s <= 1.1 * outcomes[0].queue_p95_s
