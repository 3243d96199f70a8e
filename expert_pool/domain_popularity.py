"""What experts the tokens of a domain or a conversation use: learned here, and by earlier runs.

Each tenant has a row of its own for each domain; a domain's popularity is their mean, in which no
tenant counts for more than its share once others use the domain too. A tenant that taught much is
served by its own row. A conversation is its tenant's alone. What little is known of a name is drawn
towards what is known of all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from expert_pool.label_table import LabelTable
from expert_pool.popularity import Popularity

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
_Derived = TypeVar("_Derived", FloatArray | None, BoolArray | None)

EVERYONE_HALF_LIFE_TOKENS: Final = 4096.0
DOMAIN_HALF_LIFE_TOKENS: Final = 16384.0
SESSION_HALF_LIFE_TOKENS: Final = 2048.0
MAX_ROWS: Final = 64
"""Of domains by tenant, and again of sessions; fewer where memory is short."""
MAX_NAME: Final = 64
"""Characters of a name that are looked at."""
_DOMAIN_DRAWN_BY: Final = 16.0
_OWN_DRAWN_BY: Final = 512.0
"""What a tenant's own tokens of a domain say, towards what everybody's do."""
_SESSION_DRAWN_BY: Final = 64.0
_EARLIER_TOKENS: Final = 1024.0
"""Earlier runs count as so many tokens at most."""
_FREE_TOKENS: Final = 256.0
"""A tenant's share is not capped below so many tokens."""
_STALE: Final = 4
"""What was derived is derived anew after everyone's was taught so many times."""
_TOPS_SHARE: Final = 4
"""A name's top experts are one in so many of a layer's."""


class Label(NamedTuple):
    """Whose tokens these are, and what they are about; "" where unknown."""

    tenant: str
    domain: str
    session: str


class DomainPopularity:
    """Belongs to one pool. Rates are shares of tokens that choose an expert, [layers, experts]."""

    def __init__(
        self, num_layers: int, num_experts: int, memory_bytes: int, tenant_share: float
    ) -> None:
        """All tables together take about `memory_bytes` at most; 0: no names are learned.

        `tenant_share`: what one tenant counts for in a domain at most, 0 to 1.
        """
        self.shape = (num_layers, num_experts)
        row_bytes = num_layers * (4 * num_experts + 8)
        most = min(MAX_ROWS, memory_bytes // (4 * row_bytes))
        self.everyone = Popularity(*self.shape, EVERYONE_HALF_LIFE_TOKENS, np.float32)
        self.sessions = LabelTable(*self.shape, SESSION_HALF_LIFE_TOKENS, most)
        self._domains = LabelTable(*self.shape, DOMAIN_HALF_LIFE_TOKENS, most)
        self.uncounted: set[tuple[str, str]] = set()
        """Tenants and domains whose rows do not count for others, while others say more."""
        self._contrary: set[tuple[str, str]] = set()
        """Those of them that others' texts are not even compared with."""
        self._earlier: dict[str, Popularity] = {}
        self._earlier_everyone: Popularity | None = None
        self._others_for_one = (1.0 - tenant_share) / tenant_share
        self._fresh_tokens: dict[str, npt.NDArray[np.float64]] = {}
        self._version = 0
        self._derived: OrderedDict[Hashable, tuple[int, FloatArray | BoolArray]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        earlier = len(self._earlier) + (self._earlier_everyone is not None)
        derived = sum(array.nbytes for _, array in self._derived.values())
        row = self.everyone.counts.nbytes + self.everyone.tokens.nbytes
        return self.sessions.nbytes + self._domains.nbytes + (1 + earlier) * row + derived

    @property
    def learns_names(self) -> bool:
        """Whether there is memory for any."""
        return self._domains.most_rows > 0

    @property
    def domains(self) -> list[str]:
        """The domains that something is known of; those used last come last."""
        names = dict.fromkeys(self._earlier)
        for _, name in self._domains.rows:
            names.pop(name, None)
            names[name] = None
        return list(names)

    def learn_everyone(
        self, counts: npt.NDArray[np.int64], tokens: npt.NDArray[np.floating]
    ) -> None:
        """`tokens` [layers] chose experts `counts` [layers, experts] times."""
        self.everyone.add_all(counts, tokens)
        self._version += 1

    def learn(
        self, label: Label, counts: npt.NDArray[np.int64], tokens: npt.NDArray[np.float64]
    ) -> None:
        """The same of tokens with a label; everyone's is not touched."""
        if label.session:
            self.sessions.add(label.tenant, label.session, counts, tokens)
        if label.domain and self.learns_names:
            self._domains.add(label.tenant, label.domain, counts, tokens)
            if len(self.uncounted) > len(self._domains.rows):
                self.uncounted.intersection_update(self._domains.rows)
                self._contrary.intersection_update(self._domains.rows)
            if (label.tenant, label.domain) not in self.uncounted:
                self._note_fresh(label.domain, tokens)

    def count(self, label: Label, counts: bool, contrary: bool = False) -> None:
        """Whether what a tenant taught of a domain counts for others from now on; where not,
        whether it contradicts others.
        """
        key = label.tenant, label.domain
        if (key in self.uncounted, key in self._contrary) == (not counts, contrary):
            return
        self.uncounted.discard(key)
        self._contrary.discard(key)
        if self._domains.find(*key) is not None:
            if not counts:
                self.uncounted.add(key)
            if contrary:
                self._contrary.add(key)
            self._derived.clear()

    def tokens_of_own(self, label: Label) -> float:
        """Tokens that a tenant itself taught of a domain, older ones counting less."""
        row = self._domains.find(label.tenant, label.domain)
        return 0.0 if row is None else float(row.tokens.mean())

    def has_row(self, tenant: str, domain: str) -> bool:
        """Whether anything is known of what a tenant itself taught of a domain."""
        return self._domains.find(tenant, domain) is not None

    def num_others(self, label: Label) -> int:
        """Other tenants that taught a domain; what came from the disk is one."""
        return len(self._sources(label.domain, label.tenant, self._contrary)[1])

    def expected(self, label: Label) -> FloatArray | None:
        """Rates of a coming token of this label; everyone's where nothing is known of it.

        None before anything is known at all. Not to be written.
        """

        def derive() -> FloatArray | None:
            rates = self.of_domain(label.domain) if label.domain else None
            if rates is None:
                rates = self.of_everyone()
            for table, name, by_tokens in (
                (self._domains, label.domain, _OWN_DRAWN_BY),
                (self.sessions, label.session, _SESSION_DRAWN_BY),
            ):
                own = table.find(label.tenant, name) if name else None
                if own is not None and rates is not None:
                    rates = _drawn(own.counts, own.tokens, rates, by_tokens)
            return rates

        return self._cached(("expected", label), derive)

    def knows(self, label: Label) -> bool:
        """Whether more is known of a label than of everyone."""
        if label.session and self.sessions.find(label.tenant, label.session) is not None:
            return True
        return bool(label.domain) and self.of_domain(label.domain) is not None

    def of_everyone(self) -> FloatArray | None:
        """Rates of all tokens of late; of earlier runs while there are few."""

        def derive() -> FloatArray | None:
            earlier = self._earlier_everyone
            if earlier is None:
                known = bool(self.everyone.tokens.any())
                return self.everyone.all_rates().astype(np.float32) if known else None
            rates = earlier.all_rates().astype(np.float32)
            return _drawn(self.everyone.counts, self.everyone.tokens, rates, _EARLIER_TOKENS)

        return self._cached("everyone", derive)

    def of_domain(self, domain: str, without: str | None = None) -> FloatArray | None:
        """Rates of a domain's tokens, those of tenant `without` aside; None where it is unknown."""

        def derive() -> FloatArray | None:
            telling = len(self._sources(domain, without, self.uncounted)[1])
            all_agreeing = len(self._sources(domain, without, self._contrary)[1])
            # Where most say what everyone says, that is what the domain is.
            left_out = self.uncounted if 2 * telling >= all_agreeing else self._contrary
            return self._mean(domain, without, left_out)

        return self._cached(("domain", domain, without), derive)

    def tops_of_everyone(self, renew: bool = True) -> BoolArray | None:
        """A quarter of each layer's experts: those that are used most.

        Without `renew`, as they were last looked at, however long ago.
        """
        return self._cached("tops", lambda: self._tops(self.of_everyone()), renew)

    def tops_of_others(self, label: Label, renew: bool = True) -> BoolArray | None:
        """The same of a domain, by what other tenants taught; None where that is little."""

        def derive() -> BoolArray | None:
            tokens = self._sources(label.domain, label.tenant, self._contrary)[1]
            if sum(t.mean() for t in tokens) < _FREE_TOKENS:
                return None
            return self._tops(self._mean(label.domain, label.tenant, self._contrary))

        return self._cached(("others", *label[:2]), derive, renew)

    def tops_of_own(self, label: Label, renew: bool = True) -> BoolArray | None:
        """The same by what this tenant itself taught."""

        def derive() -> BoolArray | None:
            row = self._domains.find(label.tenant, label.domain)
            return None if row is None else self._tops(row.counts.astype(np.float32))

        return self._cached(("own", *label[:2]), derive, renew)

    def replace_earlier(self, everyone: Popularity, domains: Mapping[str, Popularity]) -> None:
        """What earlier runs and other replicas know, in place of what was known of that before."""
        most = max(1, self._domains.most_rows)
        if not self.learns_names:
            domains = {}
        fitting = sorted(domains, key=lambda name: -domains[name].tokens.sum())[:most]
        # Assigned whole: whoever looks sees the one or the other.
        self._earlier = {name: domains[name].in_single() for name in fitting}
        self._earlier_everyone = everyone.in_single()
        self._derived.clear()

    def fresh_by_domain(self) -> dict[str, Popularity]:
        """By domain: what was learned here since `forget_fresh`, a tenant's share capped."""
        fresh = {}
        for domain, tokens in self._fresh_tokens.items():
            rates = self.of_domain(domain, _EARLIER)
            if rates is None:
                continue
            popularity = Popularity(*self.shape, DOMAIN_HALF_LIFE_TOKENS)
            popularity.counts[:] = rates * tokens[:, None]
            popularity.tokens[:] = tokens
            fresh[domain] = popularity
        return fresh

    def forget_fresh(self) -> None:
        """It has been kept."""
        self._fresh_tokens = {}

    def _note_fresh(self, domain: str, tokens: npt.NDArray[np.float64]) -> None:
        fresh = self._fresh_tokens.pop(domain, 0.0)
        if len(self._fresh_tokens) >= MAX_ROWS:
            # Names whose rows are gone: those that a client invents keep out nobody else's.
            known = {name for _, name in self._domains.rows}
            for name in self._fresh_tokens.keys() - known:
                del self._fresh_tokens[name]
        self._fresh_tokens[domain] = tokens + fresh

    def _mean(
        self, domain: str, without: str | None, left_out: Collection[tuple[str, str]]
    ) -> FloatArray | None:
        counts, tokens = self._sources(domain, without, left_out)
        everyone = self.of_everyone()
        if not tokens or everyone is None:
            return None
        sizes = np.array([t.mean() for t in tokens])
        allowed = np.minimum(
            sizes, (sizes.sum() - sizes) / max(self._others_for_one, 1e-9) + _FREE_TOKENS
        )
        weights = allowed / np.maximum(sizes, 1e-9) if len(tokens) > 1 else np.ones(1)
        summed = np.zeros(self.shape, np.float32)
        total = np.zeros(self.shape[0])
        for weight, count, token in zip(weights, counts, tokens, strict=True):
            summed += np.float32(weight) * count
            total += weight * token
        return _drawn(summed, total, everyone, _DOMAIN_DRAWN_BY)

    def _tops(self, rates: FloatArray | None) -> BoolArray | None:
        if rates is None:
            return None
        number = max(1, self.shape[1] // _TOPS_SHARE)
        top = np.argpartition(-rates, number - 1, axis=1)[:, :number]
        mask: BoolArray = np.zeros(self.shape, np.bool_)
        np.put_along_axis(mask, top, True, axis=1)
        return mask

    def _sources(
        self, domain: str, without: str | None, left_out: Collection[tuple[str, str]]
    ) -> tuple[Sequence[FloatArray], Sequence[npt.NDArray[np.float64]]]:
        counts, tokens = [], []
        for tenant, row in self._domains.of(domain).items():
            if tenant != without and (tenant, domain) not in left_out:
                counts.append(row.counts.astype(np.float32, copy=False))
                tokens.append(row.tokens)
        earlier = self._earlier.get(domain)
        if earlier is not None and without != _EARLIER:
            scale = min(1.0, _EARLIER_TOKENS / max(float(earlier.tokens.mean()), 1e-9))
            counts.append((earlier.counts * scale).astype(np.float32))
            tokens.append(earlier.tokens * scale)
        return counts, tokens

    def _cached(
        self, key: Hashable, derive: Callable[[], _Derived], renew: bool = True
    ) -> _Derived:
        found = self._derived.get(key)
        if found is not None and (not renew or self._version - found[0] < _STALE):
            self._derived.move_to_end(key)
            return found[1]  # type: ignore[return-value]
        derived = derive()
        if derived is None:
            return derived  # more may be known soon
        self._derived[key] = (self._version, derived)
        if len(self._derived) > max(self._domains.most_rows, 4):
            self._derived.popitem(last=False)
        return derived


_EARLIER: Final = "\x00earlier runs"
"""Stands for a tenant; no tenant's name has such a character."""


def _drawn(
    counts: npt.NDArray[np.floating],
    tokens: npt.NDArray[np.floating],
    towards: FloatArray,
    by_tokens: float,
) -> FloatArray:
    """Rates of `counts`, drawn towards others by so many imagined tokens."""
    rates = (counts + np.float32(by_tokens) * towards) / (tokens + by_tokens)[:, None]
    return rates.astype(np.float32)
