"""Which replica a request goes to: the one where it costs the fewest seconds.

A plain class: reports and requests are passed in, as is the clock. What things cost comes from the
replicas' own measurements; the settings hold bounds only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from deployments.dispatch_cost import NEVER_S, UNKNOWN, Coefficients, Load, price
from deployments.dispatch_counts import DispatchCounts
from deployments.dispatch_settings import DispatchSettings
from deployments.domain_places import DomainPlaces
from deployments.last_replicas import LastReplicas, prefix_tokens
from deployments.replica_report import RATE_STEP, ReplicaReport, domain_hash
from deployments.sent_requests import SentRequests

BY_COST = "cost"
LEAST_LOADED = "least loaded: nothing measured yet"
OLD_REPORTS = "power of two: old reports"
NO_REPORTS = "power of two: no reports"
_ALIKE = 2.0
"""Measured costs of two replicas within this factor of each other count as the same machine's."""
_MOST_TOKENS = 10_000_000
_DOMAINS_REMEMBERED = 256
_PLACES_HALF_LIFE = 10.0
"""Requests of a domain after which one's place counts half."""
_SPECIALISING = 0.8
"""How much more of a domain's experts a replica is taken to hold soon if all of the domain's last
requests, and none of the others, went there. Bounded by the affinity's share of a cost, as what is
reported is. Chosen on recorded routing (`python -m benchmarks.dispatch`)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as the dispatcher sees it."""

    prompt_tokens: int
    max_tokens: int = 256
    domain: str = ""
    confidence: float = 1.0
    """How sure the domain is, 0 to 1."""
    session: str = ""
    tenant: str = ""
    prefix: tuple[int, ...] = ()
    """Hashes of the prompt's beginnings as `prefix_hashes` makes them, longest last."""
    sequences: int = 1
    """Answers that share the prompt."""


@dataclass(frozen=True, slots=True)
class Choice:
    """All candidates, best first, what each would cost, and by what rule."""

    replicas: tuple[str, ...]
    costs_s: tuple[float, ...]
    """In the order of `replicas`; sequences instead of seconds unless the reason is "cost"."""
    reason: str


@dataclass(slots=True)
class _Known:
    report: ReplicaReport
    hit_rate: float = 0.0
    """Expected for the present ask."""
    costs: Coefficients = UNKNOWN


class Dispatcher:
    """Reports in, choices out. Not thread-safe: one event loop owns it.

    The clock is the one that `ReplicaReport.made_s` is of: wall-clock seconds in a service.
    """

    def __init__(
        self,
        settings: DispatchSettings,
        clock: Callable[[], float],
        seed: int = 0,
        counts: DispatchCounts | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._random = random.Random(seed)
        self._reports: dict[str, ReplicaReport] = {}
        self._sent = SentRequests(settings.report_lag_s)
        self._prefixes = LastReplicas(settings.remembered_prefixes)
        self._sessions = LastReplicas(settings.remembered_prefixes)
        self._places = DomainPlaces(_DOMAINS_REMEMBERED, _PLACES_HALF_LIFE)
        self.counts = counts or DispatchCounts()

    def report(self, replica: str, report: ReplicaReport | None) -> None:
        """A replica's news. A report that makes no sense counts as none, as does None."""
        now_s = self._clock()
        if report is None or not report.sane:
            self.counts.unreadable_reports += 1
            self._reports.pop(replica, None)
            self._sent.reported(replica, now_s)  # whatever it says, it is not silent
            return
        self._reports[replica] = report
        self._sent.reported(replica, min(report.made_s or now_s, now_s))

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget the others."""
        kept = set(replicas)
        self._reports = {name: r for name, r in self._reports.items() if name in kept}
        self._sent.keep(kept)
        self._places.keep(kept)

    @property
    def open_tickets(self) -> int:
        """Requests sent and not ended."""
        return len(self._sent)

    def sent(self, replica: str, ask: Ask) -> int:
        """A request went to a replica; returns the ticket to give back when it ended."""
        report = self._reports.get(replica)
        served = report.served_tokens if report is not None else 0.0
        for key in ask.prefix:
            self._prefixes.remember(key, replica, served)
        self._places.sent(ask.domain, replica)
        if ask.session:
            self._sessions.remember((ask.tenant, ask.session), replica, served)
        tokens = _bounded(ask.prompt_tokens)
        return self._sent.sent(replica, _sequences(ask), tokens, self._clock())

    def arrived(self, ticket: int) -> bool:
        """The replica has taken the request, so its reports show it; False if that was known."""
        return self._sent.arrived(ticket, self._clock())

    def ended(self, ticket: int) -> None:
        """The request of this ticket is over, however it ended."""
        self._sent.ended(ticket, self._clock())

    def choose(self, ask: Ask, candidates: Sequence[str]) -> Choice:
        """All candidates in order of preference, each once."""
        names = list(dict.fromkeys(candidates))
        known = {name: _Known(self._reports[name]) for name in names if self._is_fresh(name)}
        if not known:
            choice = self._by_power_of_two(names)
        elif any(one.report.measured for one in known.values()):
            choice = self._by_cost(ask, names, known)
        else:
            choice = self._by_load(ask, names, known)
        self.counts.reasons[choice.reason] += 1
        return choice

    def _is_fresh(self, name: str) -> bool:
        """A report stays true while nothing is sent; what is sent must show in a newer one."""
        if name not in self._reports:
            return False
        since_s = self._sent.of(name).first_unseen_s
        return since_s is None or self._clock() - since_s <= self._settings.report_limit_s

    def _is_silent(self, name: str) -> bool:
        """A request was sent there long ago, and neither a report nor its end came back."""
        since_s = self._sent.of(name).oldest_s
        return since_s is not None and self._clock() - since_s > self._settings.report_limit_s

    def _by_power_of_two(self, names: list[str]) -> Choice:
        loads = {name: float(self._sent.of(name).open) for name in names}
        order = self._random.sample(names, len(names))
        pair = sorted(order[:2], key=loads.__getitem__)
        order = pair + order[2:]
        reason = OLD_REPORTS if any(name in self._reports for name in names) else NO_REPORTS
        return Choice(tuple(order), tuple(loads[name] for name in order), reason)

    def _by_load(self, ask: Ask, names: list[str], known: dict[str, _Known]) -> Choice:
        self._expect_hits(ask, known)
        loads = {}
        for name in names:
            report = known[name].report if name in known else None
            loads[name] = Load.of(report, self._sent.of(name), 0.0).sequences
            if report is not None and not report.ready:
                loads[name] += NEVER_S
        least = min(loads.values())
        best = max((known[name].hit_rate for name in known if loads[name] == least), default=0.0)
        ties = [
            name
            for name in names
            if loads[name] == least and (name not in known or known[name].hit_rate == best)
        ]
        return self._ordered(ask, ties, loads, LEAST_LOADED)

    def _by_cost(self, ask: Ask, names: list[str], known: dict[str, _Known]) -> Choice:
        self._expect_hits(ask, known)
        typical = self._share_costs(known)
        usual_places = median(one.report.max_sequences for one in known.values())
        answers = [r.answer_tokens for r in (k.report for k in known.values()) if r.answer_tokens]
        most = float(self._settings.tokens_ahead)
        usual = min(sum(answers) / len(answers), most) if answers else most
        tokens = min(float(_bounded(ask.max_tokens)), usual)
        reuse = self._reusable(ask, known)
        worst = min(one.hit_rate for one in known.values())
        best = max(one.hit_rate for one in known.values())
        costs_s, resolutions_s = {}, {}
        for name in names:
            # One that says nothing among others that do is taken for an average one that is as
            # busy as it was, by what this gateway sent if it never said anything, and holds no
            # more than the worst of them.
            one = known.get(name)
            parts = price(
                float(_bounded(ask.prompt_tokens)),
                tokens,
                _sequences(ask),
                reuse.get(name, 0.0),
                Load.of(self._reports.get(name), self._sent.of(name), tokens, usual_places),
                one.costs if one else typical,
                usual,
            )
            whole_s = parts.load_s + parts.cold_s * (1.0 - worst)
            credit_s = parts.reuse_s
            if one is not None:
                credit_s += parts.cold_s * (one.hit_rate - worst)
            # Nobody is forgiven that one waits for a place there.
            forgiven_s = self._settings.affinity_share * (whole_s - parts.waits_s)
            costs_s[name] = whole_s - min(credit_s, forgiven_s)
            if self._is_silent(name) if one is None else not one.report.ready:
                costs_s[name] += NEVER_S
            resolutions_s[name] = parts.cold_s * RATE_STEP
        least = min(costs_s, key=costs_s.__getitem__)
        # Rates are rounded: what differs by less than their last digit is equal.
        equal_s = costs_s[least] + resolutions_s[least]
        ties = [name for name in known if costs_s[name] <= equal_s] or [least]
        choice = self._ordered(ask, ties, costs_s, BY_COST)
        first = known.get(choice.replicas[0])
        self.counts.cost_s += choice.costs_s[0]
        self.counts.best_hit_rate += first is not None and first.hit_rate >= best - RATE_STEP
        return choice

    def _expect_hits(self, ask: Ask, known: dict[str, _Known]) -> None:
        """What share of the ask's experts each replica is likely to hold."""
        domain = domain_hash(ask.domain) if ask.domain else -1
        lean = self._places.lean(ask.domain, known)
        sure = min(max(ask.confidence, 0.0), 1.0) if ask.confidence == ask.confidence else 0.0
        for name, one in known.items():
            report = one.report
            named = report.domains.get(domain, report.hit_rate)
            named = min(max(named + _SPECIALISING * lean[name], 0.0), 1.0)
            one.hit_rate = sure * named + (1.0 - sure) * report.hit_rate
        # A replica that has served much less than the others has had no chance yet to show its
        # worth: it counts as good as the best one at first.
        half = float(self._settings.newcomer_tokens)
        if half <= 0 or len(known) < 2:
            return
        best = max(one.hit_rate for one in known.values())
        eldest = max(one.report.served_tokens for one in known.values())
        for one in known.values():
            doubt = 0.5 ** (one.report.served_tokens / half) - 0.5 ** (eldest / half)
            one.hit_rate += doubt * (best - one.hit_rate)

    def _share_costs(self, known: dict[str, _Known]) -> Coefficients:
        """Gives each replica its coefficients; returns the median ones.

        Replicas on equal machines differ by noise alone, which must not decide; one without
        measurements is taken for an average one.
        """
        measured = [one.report for one in known.values() if one.report.measured]
        typical = Coefficients(
            median(report.step_s for report in measured),
            median(report.sequence_s for report in measured),
            median(report.prefill_token_s for report in measured),
            median(report.cold_token_s for report in measured),
        )
        for one in known.values():
            report = one.report
            one.costs = typical
            if report.measured:
                one.costs = Coefficients(
                    _alike(report.step_s, typical.step_s),
                    _alike(report.sequence_s, typical.sequence_s),
                    _alike(report.prefill_token_s, typical.prefill_token_s),
                    _alike(report.cold_token_s, typical.cold_token_s),
                )
        return typical

    def _reusable(self, ask: Ask, known: dict[str, _Known]) -> dict[str, float]:
        """Prompt tokens that each replica has computed before and is likely to have kept."""
        tokens: dict[str, float] = {}
        for position, key in enumerate(ask.prefix):
            for name, served_then in self._prefixes.of(key).items():
                one = known.get(name)
                if one is None or not one.report.kv_tokens:
                    continue
                # Fewer than then: its rank was made anew.
                if 0 <= one.report.served_tokens - served_then <= one.report.kv_free_tokens:
                    tokens[name] = float(prefix_tokens(position))
        return tokens

    def _ordered(self, ask: Ask, ties: list[str], costs: dict[str, float], reason: str) -> Choice:
        """One of the best first: where its session was, else any of them; then by cost."""
        last = self._sessions.last((ask.tenant, ask.session)) if ask.session else None
        first = last if last in ties else self._random.choice(ties)
        rest = sorted((name for name in costs if name != first), key=costs.__getitem__)
        order = (first, *rest)
        return Choice(order, tuple(costs[name] for name in order), reason)


def _alike(own: float, typical: float) -> float:
    return typical if typical / _ALIKE <= own <= typical * _ALIKE else own


def _bounded(tokens: float) -> int:
    return int(min(max(tokens, 0), _MOST_TOKENS)) if math.isfinite(tokens) else 0


def _sequences(ask: Ask) -> int:
    return max(1, _bounded(ask.sequences))
