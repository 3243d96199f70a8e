"""Requests go where they cost the fewest seconds, by what replicas measured and report."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.dispatch_cost import MISS_WEIGHT
from deployments.dispatch_settings import DispatchSettings
from deployments.dispatcher import (
    BY_COST,
    LEAST_LOADED,
    NO_REPORTS,
    OLD_REPORTS,
    Ask,
    Dispatcher,
)
from deployments.last_replicas import prefix_hashes
from deployments.replica_report import ReplicaReport, domain_hash

IDLE = ReplicaReport(
    served_tokens=100_000,
    kv_free_tokens=50_000,
    kv_tokens=50_000,
    max_sequences=8,
    step_s=0.02,
    sequence_s=0.002,
    prefill_token_s=0.0005,
    cold_token_s=0.1,
    hit_rate=0.6,
    answer_tokens=100,
)
ASK = Ask(prompt_tokens=200, max_tokens=200)
PAIR = ("a", "b")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def with_rates(report: ReplicaReport = IDLE, **rates: float) -> ReplicaReport:
    return replace(report, domains={domain_hash(name): rate for name, rate in rates.items()})


def dispatcher(clock: Clock | None = None, seed: int = 0, **settings: float) -> Dispatcher:
    return Dispatcher(DispatchSettings.model_validate(settings), clock or Clock(), seed)


def told(reports: dict[str, ReplicaReport], **settings: float) -> Dispatcher:
    made = dispatcher(**settings)
    for name, report in reports.items():
        made.report(name, report)
    return made


def test_a_domain_goes_where_its_experts_are() -> None:
    made = told({"a": with_rates(code=0.9, law=0.4), "b": with_rates(code=0.4, law=0.9)})
    for _ in range(5):
        assert made.choose(replace(ASK, domain="code"), PAIR).replicas == ("a", "b")
        assert made.choose(replace(ASK, domain="law"), PAIR).replicas == ("b", "a")
    assert made.counts.best_hit_rate == 10
    assert made.counts.reasons == {BY_COST: 10}


def test_a_domain_that_is_not_sure_weighs_less() -> None:
    busy = replace(with_rates(code=0.9), running=1, hit_rate=0.9)
    made = told({"a": busy, "b": replace(with_rates(code=0.4), hit_rate=0.9)})
    assert made.choose(replace(ASK, domain="code"), PAIR).replicas[0] == "a"
    assert made.choose(replace(ASK, domain="code", confidence=0.1), PAIR).replicas[0] == "b"


def test_cost_is_in_seconds_and_grows_with_each_part() -> None:
    def cost(report: ReplicaReport, ask: Ask = ASK) -> float:
        return told({"a": report}).choose(ask, ("a",)).costs_s[0]

    alone = cost(IDLE)
    # 100 tokens are usual: 0.5 ms a prompt token, and steps of one sequence with 0.4 misses.
    assert alone == pytest.approx(200 * 0.0005 + 100 * (0.022 + MISS_WEIGHT * 0.1 * 0.4))
    assert cost(replace(IDLE, running=3)) > alone
    assert cost(replace(IDLE, prompt_tokens=4000)) == pytest.approx(alone + 2.0)
    assert cost(replace(IDLE, hit_rate=0.3)) > alone
    assert cost(IDLE, replace(ASK, prompt_tokens=2000)) > alone
    assert cost(IDLE, replace(ASK, max_tokens=10)) < alone
    assert cost(IDLE, replace(ASK, max_tokens=10**9)) == pytest.approx(alone), "bounded"
    full = replace(IDLE, running=8)
    assert cost(replace(full, waiting=8)) > cost(replace(full, waiting=1)) > cost(full)
    tight = replace(full, running=7, kv_tokens=2000)
    assert cost(replace(tight, kv_free_tokens=10)) > cost(replace(tight, kv_free_tokens=1000))


def test_full_replicas_come_last_and_one_that_can_never_hold_it_after_them() -> None:
    tiny = replace(IDLE, kv_tokens=100, kv_free_tokens=100)
    full = replace(IDLE, running=8, waiting=50, prompt_tokens=20_000)
    made = told({"tiny": tiny, "full": full, "free": IDLE})
    assert made.choose(ASK, ("tiny", "full", "free")).replicas == ("free", "full", "tiny")


def test_what_was_sent_counts_until_a_report_shows_it() -> None:
    clock = Clock()
    made = dispatcher(clock)
    for name in PAIR:
        made.report(name, IDLE)
    chosen = Counter()
    for _ in range(20):
        name = made.choose(ASK, PAIR).replicas[0]
        made.arrived(made.sent(name, ASK))
        chosen[name] += 1
    assert chosen == {"a": 10, "b": 10}
    # A report that came at once cannot show them; one that came later does.
    made.report("a", IDLE)
    assert made.choose(ASK, PAIR).costs_s[0] == pytest.approx(made.choose(ASK, PAIR).costs_s[1])
    clock.now_s += 1.0
    made.report("a", replace(IDLE, served_tokens=100_100, running=2))
    assert made.choose(ASK, PAIR).replicas[0] == "a"


def test_ended_requests_leave_their_place() -> None:
    clock = Clock()
    made = dispatcher(clock)
    for name in PAIR:
        made.report(name, IDLE)
    tickets = [made.sent("a", ASK) for _ in range(4)]
    assert all(made.arrived(ticket) for ticket in tickets)
    clock.now_s += 1.0
    made.report("a", replace(IDLE, served_tokens=100_001, running=4))
    assert made.choose(ASK, PAIR).replicas[0] == "b"
    for ticket in tickets:
        made.ended(ticket)
        made.ended(ticket)
    costs = made.choose(ASK, PAIR).costs_s
    assert costs[0] == pytest.approx(costs[1]), "the report's four are known to have ended"


def test_a_request_that_ended_while_a_report_was_on_its_way_is_no_ghost() -> None:
    clock = Clock()
    made = dispatcher(clock)
    for name in PAIR:
        made.report(name, IDLE)
    ticket = made.sent("a", ASK)
    clock.now_s += 0.2
    seen = replace(IDLE, made_s=clock.now_s, served_tokens=100_100, running=1)
    clock.now_s += 0.2
    made.ended(ticket)
    clock.now_s += 0.2
    made.report("a", seen)
    costs = made.choose(ASK, PAIR).costs_s
    assert costs[0] == pytest.approx(costs[1])


def test_idle_equals_share_and_noise_in_what_they_measured_does_not_decide() -> None:
    noisy = {f"r{i}": replace(IDLE, step_s=0.02 * (1 + 0.02 * i)) for i in range(4)}
    made = told(noisy)
    chosen = Counter(made.choose(ASK, list(noisy)).replicas[0] for _ in range(400))
    assert set(chosen) == set(noisy) and min(chosen.values()) > 60


def test_a_slower_machine_is_known_as_one() -> None:
    slow = replace(IDLE, step_s=0.2, sequence_s=0.02, prefill_token_s=0.005)
    made = told({"a": slow, "b": IDLE, "c": IDLE})
    assert {made.choose(ASK, ("a", "b", "c")).replicas[-1] for _ in range(9)} == {"a"}


def test_a_session_stays_among_equals_and_a_prefix_pulls() -> None:
    made = told({"a": IDLE, "b": IDLE, "c": IDLE})
    mine = replace(ASK, tenant="t", session="s")
    first = made.choose(mine, ("a", "b", "c")).replicas[0]
    made.ended(made.sent(first, mine))
    assert {made.choose(mine, ("a", "b", "c")).replicas[0] for _ in range(20)} == {first}
    long = Ask(prompt_tokens=4096, prefix=prefix_hashes(range(4096), "t"))
    made.ended(made.sent("b", long))
    made.report("b", replace(IDLE, served_tokens=104_096))
    assert made.choose(long, ("a", "b", "c")).replicas[0] == "b", "2 s of prefill saved"
    # What all prompts begin with lies on several.
    made.ended(made.sent("c", long))
    assert {made.choose(long, ("a", "b", "c")).replicas[0] for _ in range(30)} == {"b", "c"}
    made.report("c", replace(IDLE, served_tokens=200_000))
    # Once as many tokens have passed as there is room for, it is likely gone.
    made.report("b", replace(IDLE, served_tokens=200_000))
    assert {made.choose(long, ("a", "b", "c")).replicas[0] for _ in range(30)} == {"a", "b", "c"}


def test_equal_prompts_of_two_tenants_share_no_prefix() -> None:
    assert len(prefix_hashes(range(63), "t")) == 0
    hashes = prefix_hashes(range(500), "t")
    assert len(hashes) == 3
    assert hashes[:2] == prefix_hashes([*range(128), *range(400)], "t")[:2]
    assert not set(hashes) & set(prefix_hashes(range(500), "u"))


def test_before_anything_is_measured_the_least_loaded_is_taken() -> None:
    new = ReplicaReport(max_sequences=8)
    made = told({"a": replace(new, running=2), "b": new, "c": replace(new, running=1)})
    choice = made.choose(ASK, ("a", "b", "c"))
    assert (choice.replicas, choice.reason) == (("b", "c", "a"), LEAST_LOADED)
    made.sent("b", ASK)
    made.sent("b", ASK)
    assert made.choose(ASK, ("a", "b", "c")).replicas[0] == "c"


def test_with_no_reports_two_are_compared_by_what_was_sent() -> None:
    made = dispatcher()
    names = [f"r{i}" for i in range(4)]
    chosen = Counter()
    for _ in range(80):
        choice = made.choose(ASK, names)
        assert choice.reason == NO_REPORTS
        made.sent(choice.replicas[0], ASK)
        chosen[choice.replicas[0]] += 1
    assert max(chosen.values()) - min(chosen.values()) <= 8


def test_reports_that_stop_are_old_only_once_something_was_sent() -> None:
    clock = Clock()
    made = dispatcher(clock)
    for name in PAIR:
        made.report(name, IDLE)
    clock.now_s += 3600.0
    assert made.choose(ASK, PAIR).reason == BY_COST, "an idle replica's report stays true"
    for name in PAIR:
        made.ended(made.sent(name, ASK))
    clock.now_s += 10.0
    assert made.choose(ASK, PAIR).reason == OLD_REPORTS
    made.report("a", replace(IDLE, served_tokens=100_300))
    choice = made.choose(ASK, PAIR)
    assert (choice.replicas[0], choice.reason) == ("a", BY_COST), "the silent one is no better"
    assert made.choose(ASK, ("b",)).reason == OLD_REPORTS


def test_the_same_seed_gives_the_same_choices() -> None:
    def choices(seed: int) -> list[str]:
        made = dispatcher(seed=seed)
        for name in ("a", "b", "c"):
            made.report(name, IDLE)
        return [made.choose(ASK, ("a", "b", "c")).replicas[0] for _ in range(30)]

    assert choices(1) == choices(1) != choices(2)


anything = st.floats() | st.integers(-(10**9), 10**9)
reports = st.builds(
    ReplicaReport,
    ready=st.booleans(),
    served_tokens=anything,
    running=anything,
    waiting=anything,
    prompt_tokens=anything,
    kv_free_tokens=anything,
    kv_tokens=anything,
    max_sequences=anything,
    step_s=anything | st.floats(0, 1),
    sequence_s=anything | st.floats(0, 1),
    prefill_token_s=anything | st.floats(0, 1),
    cold_token_s=anything | st.floats(0, 1),
    hit_rate=anything | st.floats(0, 1),
    answer_tokens=anything,
    domains=st.dictionaries(st.sampled_from([domain_hash("code"), 7]), anything, max_size=2),
)
sane = st.builds(
    ReplicaReport,
    served_tokens=st.floats(0, 1e12),
    running=st.floats(0, 1e12),
    waiting=st.floats(0, 1e12),
    kv_free_tokens=st.floats(0, 1e12),
    kv_tokens=st.floats(0, 1e12),
    max_sequences=st.floats(0, 1e12),
    step_s=st.floats(0, 1e12),
    sequence_s=st.floats(0, 1e12),
    prefill_token_s=st.floats(0, 1e12),
    cold_token_s=st.floats(0, 1e12),
    hit_rate=st.floats(0, 1),
    answer_tokens=st.floats(0, 1e12),
)
asks = st.builds(
    Ask,
    prompt_tokens=st.integers(-5, 10**12),
    max_tokens=st.integers(-5, 10**12),
    domain=st.sampled_from(["", "code", "law"]),
    confidence=st.floats(),
    session=st.sampled_from(["", "s"]),
    prefix=st.lists(st.integers(0, 3), max_size=20).map(tuple),
    sequences=st.integers(-1, 20),
)
NAMES = ["a", "b", "c", "d"]


@given(
    st.dictionaries(st.sampled_from(NAMES), reports | sane | st.none()),
    st.lists(st.tuples(asks, st.lists(st.sampled_from(NAMES), unique=True), st.booleans())),
)
def test_every_candidate_comes_back_once_whatever_is_reported(reported, asked) -> None:
    clock = Clock()
    made = dispatcher(clock)
    tickets = []
    for ask, candidates, early in asked:
        for name, report in reported.items():
            made.report(name, report)
        choice = made.choose(ask, candidates)
        assert sorted(choice.replicas) == sorted(candidates)
        assert len(choice.costs_s) == len(candidates)
        assert all(cost == cost for cost in choice.costs_s), "never NaN"
        if candidates:
            tickets.append(made.sent(choice.replicas[0], ask))
        clock.now_s += 1.0
        if early and tickets:
            made.ended(tickets.pop(0))
    for ticket in tickets:
        made.ended(ticket)
    assert made.open_tickets == 0
    for name in NAMES:
        local = made._sent.of(name)
        assert (local.open, local.unseen, local.unseen_prompt_tokens) == (0, 0, 0)
        assert not local.tickets
