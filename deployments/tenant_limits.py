"""How much each tenant may use: requests and tokens in any minute, requests at once.

One instance holds the counts of the whole service. It knows nothing of keys or HTTP: whoever asks
says what the tenant may do. What a request holds is a lease, which its gateway renews; the leases
of a gateway that died expire.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

WINDOW_S = 60
LEASE_S = 15.0
"""A lease that is not renewed for so long is given up."""
_HOLDS = 16
_ENDED_KEPT = 10_000


class Allowance(msgspec.Struct, frozen=True):
    """The limits of one tenant; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    @property
    def unlimited(self) -> bool:
        """Whether nothing has to be counted."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrency)
        return all(limit is None for limit in limits)


class Refusal(msgspec.Struct, frozen=True):
    """Why a tenant has to wait, and for how long."""

    message: str
    retry_after_s: float


class Use(msgspec.Struct, frozen=True):
    """What a gateway reports of a lease that it holds; counted once, however often it comes."""

    lease: str
    tenant: str
    tokens: int = 0
    """All that the lease produced since it began."""
    ended: bool = False
    acknowledged: int = 0
    """Of `tokens`, what an earlier report brought for certain; a restart counts it no more."""


class Window:
    """Amounts of the last minute in cells of a second: no minute ever has more than the limit."""

    def __init__(self) -> None:
        self._cells: deque[tuple[int, int]] = deque()
        self.total = 0

    def add(self, now_s: float, amount: int) -> None:
        """Count an amount now."""
        if amount <= 0:
            return
        second = int(now_s)
        if self._cells and self._cells[-1][0] == second:
            self._cells[-1] = (second, self._cells[-1][1] + amount)
        else:
            self._cells.append((second, amount))
        self.total += amount

    def forget(self, now_s: float) -> None:
        """Drop what is older than a minute."""
        while self._cells and self._cells[0][0] + 1 + WINDOW_S <= now_s:
            self.total -= self._cells.popleft()[1]

    def wait_s(self, now_s: float, at_most: int) -> float:
        """Seconds until no more than `at_most` of what is counted now is left."""
        left, wait_s = self.total, 0.0
        for second, amount in self._cells:
            if left <= at_most:
                break
            left -= amount
            wait_s = second + 1 + WINDOW_S - now_s
        return wait_s


@dataclass(slots=True)
class _Tenant:
    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    leases: dict[str, float] = field(default_factory=dict)
    """Lease to the moment at which it expires."""
    began: dict[str, float] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    """Lease to those of its tokens that are counted."""
    holds_s: deque[float] = field(default_factory=lambda: deque(maxlen=_HOLDS))


class TenantLimits:
    """The counts of all tenants. Plain; the clock is passed in."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Lease to those of its tokens that were counted."""

    def acquire(self, lease: str, tenant: str, allowance: Allowance) -> Refusal | None:
        """Begin a request, or say why not. A refused request counts for nothing."""
        now, state = self._clock(), self._state(tenant)
        if allowance.concurrency is not None and len(state.leases) >= allowance.concurrency:
            mean_s = sum(state.holds_s) / len(state.holds_s) if state.holds_s else 1.0
            return Refusal(
                f"The limit of {allowance.concurrency} requests at once is reached.",
                mean_s / allowance.concurrency,
            )
        if allowance.requests_per_minute is not None:
            wait_s = state.requests.wait_s(now, allowance.requests_per_minute - 1)
            if wait_s > 0:
                return _spent(allowance.requests_per_minute, "requests", wait_s)
        if allowance.tokens_per_minute is not None:
            wait_s = state.tokens.wait_s(now, allowance.tokens_per_minute - 1)
            if wait_s > 0:
                return _spent(allowance.tokens_per_minute, "tokens", wait_s)
        state.requests.add(now, 1)
        state.leases[lease] = now + LEASE_S
        state.began[lease] = now
        state.counted[lease] = 0
        return None

    def charge(self, tenant: str, tokens: int, allowance: Allowance) -> Refusal | None:
        """Count a prompt's tokens before it is computed, or say why not.

        A prompt above the limit passes when nothing was used in the last minute, so that it is not
        refused for ever.
        """
        now, state = self._clock(), self._state(tenant)
        if allowance.tokens_per_minute is not None:
            wait_s = state.tokens.wait_s(now, max(0, allowance.tokens_per_minute - tokens))
            if wait_s > 0:
                return _spent(allowance.tokens_per_minute, "tokens", wait_s)
        state.tokens.add(now, tokens)
        return None

    def report(self, uses: Iterable[Use]) -> None:
        """Renew, charge and end leases. One unknown here, after a restart, is taken on.

        A report that comes again, as after a timeout, changes nothing.
        """
        now = self._clock()
        for use in uses:
            state = self._state(use.tenant)
            before = state.counted.get(use.lease, self._ended.get(use.lease, use.acknowledged))
            counted = max(before, use.tokens)
            state.tokens.add(now, counted - before)
            if use.lease in self._ended:
                self._ended[use.lease] = counted
                continue
            if not use.ended:
                state.leases[use.lease] = now + LEASE_S
                state.began.setdefault(use.lease, now)
                state.counted[use.lease] = counted
                continue
            state.counted.pop(use.lease, None)
            self._ended[use.lease] = counted
            if len(self._ended) > _ENDED_KEPT:
                self._ended.popitem(last=False)
            if state.leases.pop(use.lease, None) is not None:
                state.holds_s.append(now - state.began.pop(use.lease))

    def counts(self) -> dict[str, dict[str, int]]:
        """Of each tenant: requests and tokens of the last minute, requests at once."""
        for tenant in list(self._tenants):
            state = self._state(tenant)
            if not (state.requests.total or state.tokens.total or state.leases):
                del self._tenants[tenant]
        return {
            tenant: {
                "requests": state.requests.total,
                "tokens": state.tokens.total,
                "at_once": len(state.leases),
            }
            for tenant, state in self._tenants.items()
        }

    def _state(self, tenant: str) -> _Tenant:
        now = self._clock()
        state = self._tenants.setdefault(tenant, _Tenant())
        state.requests.forget(now)
        state.tokens.forget(now)
        for lease in [name for name, expires in state.leases.items() if expires <= now]:
            del state.leases[lease], state.began[lease], state.counted[lease]
        return state


def _spent(limit: int, what: str, wait_s: float) -> Refusal:
    return Refusal(f"The limit of {limit} {what} a minute is reached.", wait_s)
