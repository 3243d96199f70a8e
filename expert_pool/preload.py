"""Hints: experts of a request that is still to come are read while nothing else is.

They take free slots, else that of an expert which is worth less by the policy's own measure and is
not expected either. So many a second, and of those one tenant no more than its share. What came of
it is counted in pairs: was the expert asked for soon, and was the one that made room for it asked
for even sooner? Later on it would have had to leave anyway. Where that does not pay, hints are let
pass for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from core.step import HintStats
from expert_pool.affinity_policy import DISCOUNT
from expert_pool.domain_popularity import BoolArray, FloatArray, Label
from expert_pool.store import PRELOAD
from expert_pool.tables import IntArray, State

if TYPE_CHECKING:
    from expert_pool.pool import ExpertPool

SLOTS_A_SECOND: Final = 0.5
"""Share of the slots that hints may fill in a second."""
LOOKS_A_SECOND: Final = 64
"""Hints looked at in a second, each for up to a millisecond of the step thread's time; of one
tenant no more than its share of them."""
SOON_TOUCHES: Final = 64
"""An expert is of use if it is asked for within so many touches of its layer."""
PROBE_EXPERTS: Final = 64
"""Experts whose end is known, between two verdicts."""
LEAST_GAIN: Final = 0.1
"""Of those, at least this share must have been of use beyond those that made room too early."""
FIRST_REST_HINTS: Final = 128
LONGEST_REST_HINTS: Final = 8192
_LEAST_RATE: Final = 1.5
"""Times an even share: what is expected less is not read."""
_LEAST_MARGIN: Final = 0.1


class HintPayoff:
    """Probing, on or off: as `payoff.py`, by experts instead of time."""

    def __init__(self, always: bool = False) -> None:
        self.state: Literal["probing", "on", "off"] = "on" if always else "probing"
        self._always = always
        self._ended = 0
        self._gain = 0
        self._rest_hints = FIRST_REST_HINTS
        self._left = 0

    def hinted(self) -> bool:
        """A hint has come. Whether to follow it."""
        if self.state == "off":
            self._left -= 1
            if self._left <= 0:
                self.state = "probing"
        return self.state != "off"

    def ended(self, gain: int) -> None:
        """An expert was of use (1), or not (0)."""
        self._ended += 1
        self._gain += gain
        if self._ended < PROBE_EXPERTS:
            return
        pays = self._gain >= LEAST_GAIN * self._ended
        self._ended = self._gain = 0
        if self._always or pays:
            self.state, self._rest_hints = "on", FIRST_REST_HINTS
        elif self.state == "on":
            self.state = "probing"
        else:
            self.state, self._left = "off", self._rest_hints
            self._rest_hints = min(2 * self._rest_hints, LONGEST_REST_HINTS)

    def regretted(self) -> None:
        """One that had made room was asked for."""
        self._gain -= 1


class _Open(NamedTuple):
    tenant: str
    domain: str
    until_touch: int
    victim: int | None


class _Place(NamedTuple):
    gain: float
    layer: int
    expert: int
    victim: int | None


class Preloader:
    """Belongs to one pool; its step thread calls it, between steps but for `demanded`."""

    def __init__(
        self, pool: ExpertPool, mode: Literal["auto", "on", "off"], tenant_share: float
    ) -> None:
        self.payoff = HintPayoff(always=mode == "on")
        self._pool = pool
        self._wanted = mode != "off"
        layers = pool.index.layers
        self._a_second = max(sum(pool.residency.quotas) * SLOTS_A_SECOND, 1.0)
        self._a_tenant = max(self._a_second * tenant_share, 1.0)
        self._looks_a_tenant = max(int(LOOKS_A_SECOND * tenant_share), 1)
        self._even = np.array([layer.top_k / layer.num_experts for layer in layers])
        self._second = 0
        self._used: dict[str, int] = {}
        """By tenant: experts begun in this second."""
        self._looks: Counter[str] = Counter()
        """By tenant: hints looked at in this second."""
        self._open: list[dict[int, _Open]] = [{} for _ in layers]
        """By layer: experts that were read for a hint and not yet asked for."""
        self._gone: list[dict[int, int]] = [{} for _ in layers]
        """By layer: who made room, and until which touch that is remembered."""
        self._touches = [0] * len(layers)
        self._stats = HintStats()

    def follows(self, tenant: str) -> bool:
        """A hint of a tenant has come. Whether anything could be read for it now."""
        self._stats.received += 1
        residency = self._pool.residency
        if not self._wanted or all(map(residency.has_slots_for_all, range(len(self._open)))):
            return False
        if not self.payoff.hinted() or self._pool.in_ordered_pass or self._room(tenant) <= 0:
            return False
        if self._looks[tenant] >= self._looks_a_tenant or self._looks.total() >= LOOKS_A_SECOND:
            return False
        self._looks[tenant] += 1
        return True

    def begin(self, label: Label, rates: FloatArray) -> None:
        """Begin to read what a coming request will likely ask for, by `rates` [layers, experts]."""
        room = self._room(label.tenant)
        expected = rates / (DISCOUNT * rates + (1.0 - DISCOUNT))
        likely = rates >= (_LEAST_RATE * self._even)[:, None]
        likely &= self._pool.residency.states.state == State.UNLOADED
        places = [
            place
            for layer in np.flatnonzero(likely.any(axis=1)).tolist()
            for place in self._places(layer, expected[layer], likely[layer], room)
        ]
        places.sort(key=lambda place: -place.gain)
        for place in places[:room]:
            self._read(label, place)

    def is_waiting(self, layer: int) -> bool:
        """Whether it is still to be seen what came of anything in a layer."""
        return bool(self._open[layer] or self._gone[layer])

    def demanded(self, layer: int, experts: IntArray) -> None:
        """A layer is asked for `experts`."""
        touch = self._touches[layer] = self._touches[layer] + 1
        asked, states = set(experts.tolist()), self._pool.residency.states.state[layer]
        waiting, gone, stats = self._open[layer], self._gone[layer], self._stats
        for expert, until in list(gone.items()):
            if expert in asked and states[expert] != State.RESIDENT:
                stats.regretted += 1
                self.payoff.regretted()
            if expert in asked or touch > until:
                del gone[expert]
        for expert, entry in list(waiting.items()):
            if expert in asked:
                del waiting[expert]
                if entry.victim is not None:
                    gone.pop(entry.victim, None)
                if states[expert] == State.RESIDENT:  # else it came too late to tell
                    stats.useful += 1
                    self.payoff.ended(1)
            elif touch > entry.until_touch or states[expert] == State.UNLOADED:
                del waiting[expert]
                stats.wasted += 1
                self.payoff.ended(0)

    def called_off(self, layer: int, expert: int) -> None:
        """A read was dropped before it began."""
        self._open[layer].pop(expert, None)

    def drop(self, label: Label) -> None:
        """A guess was wrong: what was read for it and not asked for is awaited no more."""
        for layer, waiting in enumerate(self._open):
            wrong = [e for e, at in waiting.items() if at[:2] == (label.tenant, label.domain)]
            self._pool.call_off(layer, wrong)
            for expert in wrong:
                self._stats.dropped += 1
                waiting.pop(expert, None)

    def take_stats(self) -> HintStats:
        """What was counted since the last time."""
        stats, self._stats = self._stats, HintStats()
        stats.state = self.payoff.state if self._wanted else "off"
        return stats

    def _room(self, tenant: str) -> int:
        second = int(self._pool.clock())
        if second != self._second:
            self._second = second
            self._used.clear()
            self._looks.clear()
        left = self._a_second - sum(self._used.values())
        left = min(left, self._a_tenant - self._used.get(tenant, 0))
        return int(min(left, self._a_second - len(self._pool.under_way)))

    def _places(
        self, layer: int, expected: FloatArray, likely: BoolArray, room: int
    ) -> Iterator[_Place]:
        """Whom to read in a layer, and in whose place, the best first."""
        residency = self._pool.residency
        policy = residency.policy
        worth = policy.worth(layer)
        together = worth + (1.0 - worth) * expected[: worth.size]
        wanted = np.flatnonzero(likely)
        wanted = wanted[np.argsort(-together[wanted], kind="stable")][:room]
        free = residency.num_free(layer)
        for expert in wanted[:free].tolist():
            yield _Place(float(together[expert]), layer, expert, None)
        wanted = wanted[free:]
        if not wanted.size:
            return
        idle = residency.evictable(layer)
        ahead = self._pool.read_ahead
        held = set(self._open[layer]) | (ahead.prefetcher.awaited(layer) if ahead else set())
        if held:
            idle = idle[~np.isin(idle, list(held))]
        victims = policy.victims(layer, idle, wanted.size)
        for expert, victim in zip(wanted.tolist(), victims.tolist(), strict=False):
            gain = float(together[expert] - together[victim])
            if gain < _LEAST_MARGIN:
                return
            yield _Place(gain, layer, expert, victim)

    def _read(self, label: Label, place: _Place) -> None:
        pool, layer = self._pool, place.layer
        until = self._touches[layer] + SOON_TOUCHES
        if place.victim is not None:
            pool.residency.evict_if_idle(layer, place.victim)
            self._gone[layer][place.victim] = until
        if not pool.residency.num_free(layer):
            return
        for expert, slot in pool.residency.admit(layer, [place.expert]):
            pool.submit(layer, expert, slot, PRELOAD)
            self._open[layer][expert] = _Open(label.tenant, label.domain, until, place.victim)
            self._used[label.tenant] = self._used.get(label.tenant, 0) + 1
            self._stats.begun += 1


def begin_preloads(pool: ExpertPool, experts: Sequence[tuple[int, int]]) -> None:
    """As `ExpertPool.preload`."""
    rank = {pair: at for at, pair in enumerate(dict.fromkeys(experts))}
    by_layer: dict[int, list[int]] = {}
    for layer, expert in rank:
        by_layer.setdefault(layer, []).append(expert)
    admitted = []
    for layer, wanted in by_layer.items():
        row = pool.residency.states.state[layer]
        missing = [expert for expert in wanted if row[expert] == State.UNLOADED]
        for expert, slot in pool.residency.admit(layer, missing, keep=np.array(wanted)):
            admitted.append((rank[layer, expert], layer, expert, slot))
    for _, layer, expert, slot in sorted(admitted):
        pool.submit(layer, expert, slot, PRELOAD)
