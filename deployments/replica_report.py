"""What a replica says of itself to the dispatchers, as at most 32 plain numbers.

Serve's controller fetches it (`record_routing_stats`), compares its text with the last one and
sends every gateway the list of replicas again when it changed. So the numbers are rounded until an
idle replica's report stays the same, and none of them is numpy's, which the controller cannot
compare. Layout: the version, below 0 while the replica has no working rank; the fields of `_HEADER`
in order, `sequences` being running and waiting ones; pairs (domain's hash, hit rate).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

VERSION = 1
MOST_FLOATS = 32
_HEADER = (
    "made_s",
    "served_tokens",
    "sequences",
    "prompt_tokens",
    "kv_free_tokens",
    "kv_tokens",
    "max_sequences",
    "step_s",
    "sequence_s",
    "prefill_token_s",
    "cold_token_s",
    "hit_rate",
    "answer_tokens",
)
_FIRST_DOMAIN = 1 + len(_HEADER)
MOST_DOMAINS = (MOST_FLOATS - _FIRST_DOMAIN) // 2
_DIGITS = 3
RATE_STEP = 0.01
"""Hit rates are rounded to multiples of this."""
_RATE_DECIMALS = 2
_COUNTS = frozenset(_HEADER[1:7])
_STAMP_DECIMALS = 3
_LARGEST = 1e12


@lru_cache(maxsize=4096)
def domain_hash(domain: str) -> int:
    """A name as a number that a float holds exactly, equal in all processes; below 2 ** 24."""
    return int.from_bytes(hashlib.blake2b(domain.encode(), digest_size=3).digest(), "big")


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica: its load, what its steps cost by measurement, and where its experts lie.

    Coefficients are 0 while they are not known. A decode step of n sequences of which m experts
    have no slot takes about step_s + n * sequence_s + m * (seconds a miss).
    """

    ready: bool = True
    """Whether it has a rank that works."""
    made_s: float = 0
    """Wall-clock seconds when it was made; 0: just now."""
    served_tokens: float = 0
    """Tokens that passed its model since its rank started, and one for each request: grows with
    all."""
    running: float = 0
    waiting: float = 0
    """Sequences in the batch, and those that wait for a place in it."""
    prompt_tokens: float = 0
    """Prompt tokens that have not been computed yet."""
    kv_free_tokens: float = 0
    kv_tokens: float = 0
    """Tokens for which keys and values can be kept: now, and at all. 0 where there is no bound."""
    max_sequences: float = 0
    step_s: float = 0
    """Seconds of a decode step before its sequences."""
    sequence_s: float = 0
    """Seconds that a sequence adds to a decode step."""
    prefill_token_s: float = 0
    """Seconds that a prompt token takes."""
    cold_token_s: float = 0
    """Seconds that a decode token adds when none of its experts has a slot."""
    hit_rate: float = 0
    """Share of a token's experts that have a slot, whatever the token is about."""
    answer_tokens: float = 0
    """Mean tokens of an answer; 0 while no request has ended."""
    domains: Mapping[int, float] = field(default_factory=dict)
    """`hit_rate` of the tokens of one domain, by `domain_hash`; those used last come last."""

    @property
    def measured(self) -> bool:
        """Whether its steps' costs are known."""
        return self.step_s + self.sequence_s > 0 and self.prefill_token_s > 0

    @property
    def sequences(self) -> float:
        """All that are there."""
        return self.running + self.waiting

    @property
    def sane(self) -> bool:
        """Whether every number is finite and of a size that it can have."""
        numbers = [getattr(self, name) for name in _HEADER]
        rates = [self.hit_rate, *self.domains.values()]
        return all(_plain(number) for number in numbers) and all(
            _plain(rate) and rate <= 1 for rate in rates
        )

    def to_floats(self) -> list[float]:
        """At most 32 rounded floats: of the domains the last `MOST_DOMAINS`, in a fixed order."""
        numbers = [float(VERSION if self.ready else -VERSION)]
        for name in _HEADER:
            value = float(getattr(self, name))
            if not abs(value) <= _LARGEST:
                value = 0.0  # also for NaN
            if name in _COUNTS:
                numbers.append(float(round(value)))
            elif name == "hit_rate":
                numbers.append(round(value, _RATE_DECIMALS))
            else:
                is_stamp = name == "made_s"
                numbers.append(round(value, _STAMP_DECIMALS) if is_stamp else _rounded(value))
        for domain, rate in sorted(list(self.domains.items())[-MOST_DOMAINS:]):
            if math.isfinite(rate):
                numbers += [float(domain), round(float(rate), _RATE_DECIMALS)]
        return numbers

    @classmethod
    def from_floats(cls, numbers: Sequence[float]) -> ReplicaReport | None:
        """The report; None where it is of another version or makes no sense."""
        if not isinstance(numbers, list | tuple) or not all(map(_plain, numbers[1:])):
            return None
        if not _FIRST_DOMAIN <= len(numbers) <= MOST_FLOATS:
            return None
        if numbers[0] not in (VERSION, -VERSION) or (len(numbers) - _FIRST_DOMAIN) % 2:
            return None
        header = dict(zip(_HEADER, numbers[1:_FIRST_DOMAIN], strict=True))
        sequences = header.pop("sequences")
        header["running"] = min(sequences, header["max_sequences"] or sequences)
        header["waiting"] = sequences - header["running"]
        rates = numbers[_FIRST_DOMAIN:]
        domains = dict(zip(map(int, rates[::2]), rates[1::2], strict=True))
        report = cls(ready=numbers[0] == VERSION, **header, domains=domains)
        return report if report.sane else None


def _plain(number: object) -> bool:
    return isinstance(number, int | float) and 0 <= number <= _LARGEST


def _rounded(value: float) -> float:
    """To three significant digits."""
    if value == 0:
        return 0.0
    return round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))
