"""Retry-After against simulated ranks: what was said, and how long it then took."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

import pytest

from core.errors import OverloadedError
from deployments.admission import Admission


@dataclass
class Running:
    name: str
    prompt_left: int
    tokens_left: int


@dataclass
class Rank:
    """A batch of `places`; a step takes longer the more it computes. Lengths are drawn."""

    places: int
    step_s: float
    length: Callable[[random.Random], tuple[int, int]]
    """(tokens asked for, tokens it comes to)"""
    prompt_tokens: int = 20
    waiting: list[Running] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    chooses: random.Random | None = None
    """Takes any of those who wait, not the first."""

    def add(self, name: str, tokens: int) -> None:
        self.waiting.append(Running(name, self.prompt_tokens, tokens))

    def step(self) -> tuple[float, list[str], list[str]]:
        """(seconds, names with one more token, names that ended)"""
        while self.waiting and len(self.running) < self.places:
            which = self.chooses.randrange(len(self.waiting)) if self.chooses else 0
            self.running.append(self.waiting.pop(which))
        produced, ended, prefill = [], [], 0
        for sequence in list(self.running):
            part = min(sequence.prompt_left, 256 - prefill)
            sequence.prompt_left -= part
            prefill += part
            if sequence.prompt_left:
                continue
            produced.append(sequence.name)
            sequence.tokens_left -= 1
            if not sequence.tokens_left:
                ended.append(sequence.name)
                self.running.remove(sequence)
        cost = self.step_s * (1 + 0.1 * len(produced) + 0.02 * prefill)
        return cost, produced, ended


class Simulation:
    """An admission in front of a rank. Time passes in steps."""

    def __init__(self, rank: Rank, queue: int, seed: int = 0) -> None:
        self.now_s = 1000.0
        self.rank = rank
        self.random = random.Random(seed)
        places = rank.places + max(2, rank.places // 2)
        self.admission = Admission(queue, 10**9, 10**9, places, lambda: self.now_s)
        self.admission.choice_sequences = 28 if rank.chooses else 0
        self.lengths: dict[str, int] = {}
        self.refusals: list[tuple[float, float, int, int]] = []
        self.departures: list[float] = []
        self.serial = 0

    def arrive(self) -> None:
        self.serial += 1
        name = str(self.serial)
        asked, tokens = self.rank.length(self.random)
        ahead = self.admission.queued_requests
        try:
            self.admission.offer(name, self.rank.prompt_tokens, 1, tokens_at_most=asked)
        except OverloadedError as error:
            said = (self.now_s, error.retry_after_s, ahead, len(self.departures))
            self.refusals.append(said)
            return
        self.lengths[name] = tokens
        self.hand_over()

    def hand_over(self) -> None:
        for name in self.admission.take():
            self.rank.add(name, self.lengths[name])

    def run(self, arrivals: Iterator[float], end_s: float) -> None:
        """Arrivals at the given times until `end_s`, all counted from now."""
        began = self.now_s
        following = began + next(arrivals)
        while self.now_s < began + end_s:
            if not (self.rank.running or self.rank.waiting):
                self.now_s = max(self.now_s, min(following, began + end_s))
            else:
                cost, produced, ended = self.rank.step()
                self.now_s += cost
                for name in produced:
                    self.admission.progress(name, 1)
                for name in ended:
                    self.admission.leave(name, completed=True)
                    self.departures.append(self.now_s)
                self.hand_over()
            while following <= self.now_s:
                self.arrive()
                following = began + next(arrivals)

    def said_and_took(self) -> list[tuple[float, float]]:
        """Of each refusal: the seconds it was told, and those until its place was there."""
        found = []
        for moment_s, said_s, ahead, departed in self.refusals:
            if departed + ahead < len(self.departures):
                found.append((said_s, self.departures[departed + ahead] - moment_s))
        return found


def poisson(rate: float, seed: int = 1) -> Iterator[float]:
    source, moment = random.Random(seed), 0.0
    while True:
        moment += source.expovariate(rate)
        yield moment


def burst(count: int, rate: float) -> Iterator[float]:
    yield from [0.0] * count
    yield from poisson(rate)


def fixed(random_source: random.Random) -> tuple[int, int]:
    return 64, 64


def ending_early(random_source: random.Random) -> tuple[int, int]:
    return 400, random_source.randint(5, 120)


def uneven(random_source: random.Random) -> tuple[int, int]:
    tokens = random_source.choice([16, 32, 64, 256])
    return tokens, tokens


def honest_share(pairs: list[tuple[float, float]]) -> float:
    """Whole seconds cannot say less than one."""
    assert pairs, "nothing was refused"
    good = [said / 2 <= max(took, 1.0) <= said * 2 for said, took in pairs]
    return sum(good) / len(good)


LENGTHS = pytest.mark.parametrize("length", [fixed, uneven, ending_early])


@LENGTHS
@pytest.mark.parametrize("queue", [8, 64])
def test_at_twice_the_capacity_a_refused_request_is_told_the_truth(length, queue: int) -> None:
    simulation = Simulation(Rank(8, 0.05, length), queue)
    simulation.run(poisson(4.0), 400.0)
    assert honest_share(simulation.said_and_took()) >= 0.95


@LENGTHS
@pytest.mark.parametrize("queue", [8, 64])
def test_it_is_the_truth_where_the_rank_chooses_among_many_who_wait(length, queue: int) -> None:
    simulation = Simulation(Rank(8, 0.05, length, chooses=random.Random(2)), queue)
    simulation.run(poisson(4.0), 400.0)
    assert honest_share(simulation.said_and_took()) >= 0.9


@pytest.mark.parametrize("length", [fixed, uneven])
def test_the_first_refused_ones_are_told_the_truth(length) -> None:
    """A burst meets a rank that has ended nothing; with one token each, it is still a guess."""
    simulation = Simulation(Rank(8, 0.05, length), 30)
    simulation.run(burst(42, 5.0), 90.0)
    assert honest_share(simulation.said_and_took()[1:21]) == 1.0


@LENGTHS
def test_a_pause_and_a_quiet_time_are_no_drain(length) -> None:
    simulation = Simulation(Rank(8, 0.05, length), 30, seed=3)
    simulation.run(poisson(4.0), 120.0)
    simulation.run(poisson(0.2, seed=5), 600.0)
    simulation.run(repeat(1e9), 300.0)
    quiet = len(simulation.said_and_took())
    simulation.run(burst(50, 5.0), 90.0)
    after = simulation.said_and_took()[quiet:]
    assert honest_share(after) >= 0.9
