"""Replicas that die, fall silent, fill up or come new, and clients that all say the same."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import mean

import pytest

from deployments.dispatch_settings import DispatchSettings
from deployments.dispatcher import BY_COST, OLD_REPORTS, Ask, Dispatcher
from deployments.last_replicas import prefix_hashes
from deployments.replica_report import ReplicaReport, domain_hash
from tests.deployments.test_dispatcher import ASK, IDLE, Clock, dispatcher, told, with_rates

NAMES = ["a", "b", "c", "d"]


def label_of(domain: str) -> str:
    return domain.rpartition(" as ")[2]


@dataclass
class Replica:
    """Serves in virtual time what its own report says; learns what it serves."""

    sequences: list[tuple[float, str, int, float]] = field(default_factory=list)
    served: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    held: float = 1.2

    def rate(self, domain: str) -> float:
        total = sum(self.shares.values())
        return min(0.95, self.held * self.shares.get(domain, 0.0) / total) if total else 0.3

    def labels(self) -> set[str]:
        return {label_of(name) for name in self.shares}

    def label_rate(self, label: str) -> float:
        """What the pool makes of a label: the mean of what came under it."""
        mine = {name: share for name, share in self.shares.items() if label_of(name) == label}
        return sum(s * self.rate(name) for name, s in mine.items()) / sum(mine.values())

    def report(self) -> ReplicaReport:
        total = sum(self.shares.values())
        mean = sum(share * self.rate(name) for name, share in self.shares.items())
        return replace(
            IDLE,
            cold_token_s=0.02,
            answer_tokens=40,
            served_tokens=self.served,
            running=min(8, len(self.sequences)),
            waiting=max(0, len(self.sequences) - 8),
            hit_rate=mean / total if total else 0.3,
            domains={domain_hash(label): self.label_rate(label) for label in self.labels()},
        )

    def step(self, now_s: float) -> tuple[float, list[tuple[int, float]], float]:
        """One decode step: its length, (ticket, waited) of what ended, misses."""
        running = self.sequences[:8]
        misses = sum(1 - self.rate(domain) for _, domain, _, _ in running)
        length_s = 0.02 + 0.002 * len(running) + 0.02 * misses
        ended = []
        for index, (left, domain, ticket, sent_s) in reversed(list(enumerate(running))):
            self.shares = {name: 0.995 * share for name, share in self.shares.items()}
            self.shares[domain] = self.shares.get(domain, 0.0) + 1.0
            self.served += 1
            if left <= 1:
                ended.append((ticket, now_s - sent_s))
                del self.sequences[index]
            else:
                self.sequences[index] = (left - 1, domain, ticket, sent_s)
        return length_s, ended, misses


@dataclass
class Outcome:
    placed: Counter[tuple[str, str]]
    waits_s: list[float]
    misses_per_token: float
    by_reason: Counter[str]

    @property
    def p95_s(self) -> float:
        return sorted(self.waits_s)[int(0.95 * len(self.waits_s))]


def simulate(
    arrivals: list[tuple[float, str]],
    replicas: dict[str, Replica],
    share: float = DispatchSettings().affinity_share,
    tokens: int = 40,
    joins: dict[str, float] | None = None,
) -> Outcome:
    """`share` 0 is load alone. `joins` says when a replica comes that is not there at first.

    A domain "law as code" is law that its client labels code.
    """
    clock = Clock()
    settings = DispatchSettings(affinity_share=share)
    made = Dispatcher(settings, clock, 1)
    start_s = clock.now_s
    free_s = dict.fromkeys(replicas, clock.now_s)
    reported_s = dict.fromkeys(replicas, -1.0)
    placed: Counter[tuple[str, str]] = Counter()
    waits: list[float] = []
    misses = steps = 0.0
    coming = list(arrivals)
    while coming or any(replica.sequences for replica in replicas.values()):
        clock.now_s += 0.01
        here = [n for n in replicas if clock.now_s - start_s >= (joins or {}).get(n, 0.0)]
        for name in here:
            replica = replicas[name]
            if clock.now_s - reported_s[name] >= 0.5:
                reported_s[name] = clock.now_s
                made.report(name, replica.report())
            if replica.sequences and free_s[name] <= clock.now_s:
                served = len(replica.sequences[:8])
                length_s, ended, missed = replica.step(clock.now_s)
                free_s[name] = clock.now_s + length_s
                misses += missed
                steps += served
                for ticket, wait_s in ended:
                    made.ended(ticket)
                    waits.append(wait_s)
        while coming and coming[0][0] <= clock.now_s - start_s:
            _, domain = coming.pop(0)
            ask = Ask(prompt_tokens=20, max_tokens=tokens, domain=label_of(domain))
            name = made.choose(ask, here).replicas[0]
            ticket = made.sent(name, ask)
            made.arrived(ticket)
            replicas[name].sequences.append((tokens, domain, ticket, clock.now_s))
            placed[name, domain] += 1
    return Outcome(placed, waits, misses / steps, made.counts.reasons)


def mixed(
    seconds: float, rate: float, domains: tuple[str, ...], seed: int = 3
) -> list[tuple[float, str]]:
    draw = random.Random(seed)
    times, now_s = [], 0.0
    while now_s < seconds:
        now_s += draw.expovariate(rate)
        times.append((now_s, draw.choice(domains)))
    return times


def four(**more: float) -> dict[str, Replica]:
    return {name: Replica(**more) for name in NAMES}


def test_mixed_domains_settle_and_miss_less_than_by_load_alone() -> None:
    arrivals = mixed(60, 4.0, ("code", "law", "math", "news"))
    ours, plain = simulate(arrivals, four()), simulate(arrivals, four(), share=0.0)
    assert ours.misses_per_token < 0.85 * plain.misses_per_token
    assert ours.p95_s < 1.1 * plain.p95_s


@pytest.mark.parametrize("rate", [3.0, 8.0])
@pytest.mark.parametrize("domains", [("code",), ("code", "law as code", "math as code")])
def test_all_labelled_code_is_no_slower_than_by_load_alone(
    rate: float, domains: tuple[str, ...]
) -> None:
    slower = []
    for seed in range(6):
        arrivals = mixed(40, rate, domains, seed)
        ours, plain = simulate(arrivals, four()), simulate(arrivals, four(), share=0.0)
        slower.append(ours.p95_s / plain.p95_s)
        used = Counter(name for name, _ in ours.placed.elements())
        assert max(used.values()) < 0.7 * len(arrivals), "one replica does not drown"
    assert mean(slower) < 1.1, slower


def test_a_burst_of_one_domain_spreads_and_the_others_keep_their_replicas() -> None:
    slower, together, apart = [], [], []
    for seed in range(12):
        steady = mixed(60, 2.0, ("law", "math"), seed)
        arrivals = sorted(steady + [(30.0 + 0.01 * i, "code") for i in range(64)])
        ours, plain = simulate(arrivals, four()), simulate(arrivals, four(), share=0.0)
        slower.append(ours.p95_s / plain.p95_s)
        assert all(ours.placed[name, "code"] for name in NAMES), "the burst went to all"
        for outcome, shares in ((ours, together), (plain, apart)):
            law = sorted(outcome.placed[name, "law"] for name in NAMES)
            shares.append(sum(law[2:]) / sum(law))
    assert mean(together) > 0.8 > 0.7 > mean(apart), "affinity was not turned off for the others"
    assert mean(slower) < 1.15, slower


def test_scale_out_to_an_empty_replica_under_load_attracts_traffic() -> None:
    arrivals = mixed(60, 6.0, ("code", "law", "math", "news"))
    replicas = four()
    ours = simulate(arrivals, replicas, joins={"d": 20.0})
    after = sum(1 for arrived_s, _ in arrivals if arrived_s > 20.0)
    new = sum(count for (name, _), count in ours.placed.items() if name == "d")
    assert new > 0.15 * after


def test_a_newcomer_gets_the_benefit_of_the_doubt_for_a_while() -> None:
    old = replace(with_rates(code=0.8), hit_rate=0.8)
    new = replace(with_rates(code=0.3), hit_rate=0.3, served_tokens=0)
    made = told({"old": old, "new": new})
    code = replace(ASK, domain="code")
    first = Counter(made.choose(code, ("old", "new")).replicas[0] for _ in range(100))
    assert first["new"] > 20, "it counts as good as the other"
    made.report("new", replace(new, served_tokens=50_000))
    assert made.choose(code, ("old", "new")).replicas[0] == "old"
    bare = told({"old": old, "new": ReplicaReport(max_sequences=8)})
    assert {bare.choose(code, ("old", "new")).replicas[0] for _ in range(50)} == {"old", "new"}


def test_a_replica_without_a_working_rank_comes_last() -> None:
    made = told({"a": replace(IDLE, ready=False), "b": replace(IDLE, running=8, waiting=20)})
    assert made.choose(ASK, ("a", "b")).replicas == ("b", "a")
    new = ReplicaReport(max_sequences=8)
    made = told({"a": replace(new, ready=False), "b": replace(new, running=3)})
    assert made.choose(ASK, ("a", "b")).replicas == ("b", "a")


def test_a_dead_replica_is_forgotten_with_what_was_sent_to_it() -> None:
    made = told({"a": IDLE, "b": IDLE})
    tickets = [made.sent("a", ASK) for _ in range(3)] + [made.sent("b", ASK)]
    made.keep(["b"])
    assert made.open_tickets == 1
    assert made.choose(ASK, ("b",)).reason == BY_COST
    for ticket in tickets:
        made.ended(ticket)
    assert made.open_tickets == 0
    # Back under its name it is a new one.
    assert made.choose(ASK, ("a", "b")).replicas[0] == "b"


def test_when_all_reports_stop_load_is_shared_by_what_was_sent() -> None:
    clock = Clock()
    made = dispatcher(clock)
    for name in NAMES:
        made.report(name, with_rates(code=0.9 if name == "a" else 0.1))
    code = replace(ASK, domain="code")
    for name in NAMES:
        made.ended(made.sent(name, code))
    clock.now_s += 60.0
    placed: Counter[str] = Counter()
    for _ in range(100):
        choice = made.choose(code, NAMES)
        assert choice.reason == OLD_REPORTS
        made.sent(choice.replicas[0], code)
        placed[choice.replicas[0]] += 1
    assert max(placed.values()) - min(placed.values()) <= 8


def test_one_that_answers_nothing_and_reports_nothing_comes_last() -> None:
    """Stopped, not dead: nothing tells the gateway but its silence."""
    clock = Clock()
    made = dispatcher(clock)
    for name in ("a", "b"):
        made.report(name, IDLE)
    ticket = made.sent("a", ASK)
    made.ended(made.sent("b", ASK))
    clock.now_s += 4.0
    made.report("b", replace(IDLE, served_tokens=100_001, running=8, waiting=8))
    assert made.choose(ASK, ("a", "b")).replicas == ("b", "a")
    made.ended(ticket)
    assert made.choose(ASK, ("a", "b")).replicas == ("a", "b"), "it lives, only its reports stop"


def test_a_report_of_nonsense_counts_as_none() -> None:
    made = told({"a": IDLE, "b": replace(IDLE, running=float("nan"))})
    assert made.counts.unreadable_reports == 1
    assert made.choose(ASK, ("a", "b")).replicas == ("a", "b")
    made.report("a", None)
    assert made.choose(ASK, ("a", "b")).reason.startswith("power of two")


def test_one_whose_reports_cannot_be_read_is_not_taken_for_silent() -> None:
    clock = Clock()
    made = dispatcher(clock)
    for name in ("a", "b"):
        made.report(name, IDLE)
    made.arrived(made.sent("a", ASK))  # a long answer
    clock.now_s += 4.0
    made.report("a", None)
    made.report("b", replace(IDLE, served_tokens=100_001, running=8, waiting=30))
    assert made.choose(ASK, ("a", "b")).replicas == ("a", "b"), "it lives, and has more room"


def test_a_rank_made_anew_holds_no_prefix_of_the_old_one() -> None:
    made = told({"a": IDLE, "b": IDLE})
    long = Ask(prompt_tokens=4096, prefix=prefix_hashes(range(4096), "t"))
    made.ended(made.sent("a", long))
    assert {made.choose(long, ("a", "b")).replicas[0] for _ in range(20)} == {"a"}
    made.report("a", replace(IDLE, served_tokens=10))
    made.report("b", replace(IDLE, served_tokens=10))
    assert {made.choose(long, ("a", "b")).replicas[0] for _ in range(20)} == {"a", "b"}
