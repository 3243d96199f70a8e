"""Where the last requests of each domain went, beside where all requests went.

Experts lie where a domain's requests were, but reported hit rates tell of it late: what was sent a
moment ago has not run yet, and while all replicas see the same mix none differs from another. Who
follows the last ones of the same domain lets the pools specialise. Only what a replica had more of
the domain than of everything counts: where all requests are of one domain, none suits it best.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class DomainPlaces:
    """Decayed counts of requests by domain and replica."""

    def __init__(self, most_domains: int, half_life_requests: float) -> None:
        """Half lives count a domain's own requests, and four times as many of all.

        Domains beyond the number are forgotten, those longest unused first.
        """
        self._most = most_domains
        self._kept = 0.5 ** (1.0 / half_life_requests)
        self._kept_of_all = 0.5 ** (0.25 / half_life_requests)
        self._counts: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._all: dict[str, float] = {}

    def sent(self, domain: str, replica: str) -> None:
        """A request went to `replica`; a `domain` of "" is none that is known."""
        _count(self._all, replica, self._kept_of_all)
        if not domain:
            return
        _count(self._counts.setdefault(domain, {}), replica, self._kept)
        self._counts.move_to_end(domain)
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)

    def lean(self, domain: str, replicas: Iterable[str]) -> dict[str, float]:
        """Each replica's share of the domain's requests less its share of all, -1 to 1; 0 where
        nothing of the domain went anywhere."""
        counts = self._counts.get(domain, {})
        own, everything = sum(counts.values()), sum(self._all.values())
        if not own or not everything:  # what is left of old counts may have decayed to nothing
            return dict.fromkeys(replicas, 0.0)
        return {
            name: counts.get(name, 0.0) / own - self._all.get(name, 0.0) / everything
            for name in replicas
        }

    def keep(self, replicas: set[str]) -> None:
        """Forget the other replicas."""
        for counts in (self._all, *self._counts.values()):
            for name in counts.keys() - replicas:
                del counts[name]


def _count(counts: dict[str, float], replica: str, kept: float) -> None:
    for name in counts:
        counts[name] *= kept
    counts[replica] = counts.get(replica, 0.0) + 1.0
