"""When requests of a load arrive and how long they are: plain, seeded, without a clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from core.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load: due `at_s` seconds after the start, with these lengths."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Lengths in tokens, drawn evenly from `lowest` to `highest`, both included."""

    lowest: int
    highest: int

    @staticmethod
    def parse(text: str, flag: str) -> TokenRange:
        """From "128" or "64-256". Raises SettingsError naming `flag`."""
        first, separator, last = text.partition("-")
        try:
            lowest = int(first)
            highest = int(last) if separator else lowest
        except ValueError:
            lowest = highest = 0
        if not 1 <= lowest <= highest:
            raise SettingsError(f"{flag} takes tokens such as 128 or 64-256, found {text!r}")
        return TokenRange(lowest, highest)

    def draw(self, random_numbers: random.Random) -> int:
        """One length."""
        return random_numbers.randint(self.lowest, self.highest)


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the requests of a load ask for."""

    prompt: TokenRange
    output: TokenRange


def gaps(rate: float, poisson: bool, random_numbers: random.Random) -> Iterator[float]:
    """For ever: seconds between two arrivals at `rate` a second, exponential for a Poisson one."""
    while True:
        yield random_numbers.expovariate(rate) if poisson else 1.0 / rate


def open_arrivals(
    rate: float,
    poisson: bool,
    lengths: Lengths,
    seed: int,
    requests: int | None,
    duration_s: float | None,
) -> list[Arrival]:
    """Arrivals that wait for nobody, ended by `requests` or `duration_s`, whichever is first.

    The times and the lengths are drawn from generators of their own, so that one seed gives the
    same lengths at every rate. Raises SettingsError where neither end is given.
    """
    if requests is None and duration_s is None:
        raise SettingsError("a load needs an end: give a number of requests or a duration")
    lengths_of = drawn(lengths, seed)
    arrivals: list[Arrival] = []
    at_s = 0.0
    for gap_s in gaps(rate, poisson, random.Random(f"{seed} times")):
        if len(arrivals) == requests or (duration_s is not None and at_s >= duration_s):
            return arrivals
        prompt_tokens, output_tokens = next(lengths_of)
        arrivals.append(Arrival(at_s, prompt_tokens, output_tokens))
        at_s += gap_s
    raise AssertionError("the gaps never end")


def closed_arrivals(lengths: Lengths, seed: int, requests: int | None) -> Iterator[Arrival]:
    """What the clients of a closed loop take one by one; due as soon as one is free."""
    for prompt_tokens, output_tokens in itertools.islice(drawn(lengths, seed), requests):
        yield Arrival(0.0, prompt_tokens, output_tokens)


def drawn(lengths: Lengths, seed: int) -> Iterator[tuple[int, int]]:
    """For ever: (prompt tokens, output tokens)."""
    random_numbers = random.Random(f"{seed} lengths")
    while True:
        yield lengths.prompt.draw(random_numbers), lengths.output.draw(random_numbers)
