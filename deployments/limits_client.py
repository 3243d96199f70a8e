"""The leases that a gateway holds for its requests: taken, charged, reported, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Iterable
from typing import Protocol

import msgspec

from core.errors import EngineUnavailableError
from deployments.openai_errors import TenantLimitError
from deployments.tenant_limits import Allowance, Refusal, TenantLimits, Use

log = logging.getLogger("ray.serve")

RENEW_S = 1.0
"""Between two reports of a gateway; what its requests produced is known that late at most."""


class LimitsStore(Protocol):
    """Where the counts are."""

    async def acquire(self, lease: str, tenant: str, allowance: Allowance) -> Refusal | None:
        """See TenantLimits."""

    async def charge(self, tenant: str, tokens: int, allowance: Allowance) -> Refusal | None:
        """See TenantLimits."""

    async def report(self, uses: list[Use]) -> None:
        """See TenantLimits."""

    async def counts(self) -> dict[str, dict[str, int]]:
        """See TenantLimits."""


class Limits:
    """The counts with the manners of LimitsStore: in a gateway, or deployed once for all."""

    def __init__(self) -> None:
        self._limits = TenantLimits(time.monotonic)

    async def acquire(self, lease: str, tenant: str, allowance: Allowance) -> Refusal | None:
        """See TenantLimits."""
        return self._limits.acquire(lease, tenant, allowance)

    async def charge(self, tenant: str, tokens: int, allowance: Allowance) -> Refusal | None:
        """See TenantLimits."""
        return self._limits.charge(tenant, tokens, allowance)

    async def report(self, uses: list[Use]) -> None:
        """See TenantLimits."""
        self._limits.report(uses)

    async def counts(self) -> dict[str, dict[str, int]]:
        """See TenantLimits."""
        return self._limits.counts()


class Lease:
    """One request's hold on its tenant's limits."""

    def __init__(self, client: LimitsClient, name: str, tenant: str, allowance: Allowance) -> None:
        self._client = client
        self._name = name
        self._tenant = tenant
        self._allowance = allowance
        self._ended = False

    async def charge_prompt(self, tokens: int) -> None:
        """Before a prompt is computed. Raises TenantLimitError."""
        await self._client.charge(self._tenant, tokens, self._allowance)

    def produced(self, tokens: int) -> None:
        """So many tokens more were generated."""
        self._client.note(Use(self._name, self._tenant, tokens))

    async def end(self) -> None:
        """The request is over; returns when its place is free for the next one. May be repeated.

        To be awaited before the client sees the end, or its next request could come too early.
        """
        if self.give_up():
            await self._client.reported()

    def give_up(self) -> bool:
        """The same without waiting; whether it was still open."""
        if self._ended:
            return False
        self._ended = True
        self._client.note(Use(self._name, self._tenant, ended=True))
        return True


class LimitsClient:
    """Leases of one gateway. One task reports for all of them, in order."""

    def __init__(self, store: LimitsStore, gateway: str) -> None:
        """`gateway` makes this gateway's leases distinct from those of others."""
        self._store = store
        self._gateway = gateway
        self._serial = 0
        self._open: dict[str, Use] = {}
        self._ended: list[Use] = []
        self._news = asyncio.Event()
        self._reporter: asyncio.Task[None] | None = None
        self._awaited: list[asyncio.Future[None]] = []

    async def lease(self, tenant: str, allowance: Allowance) -> Lease | None:
        """A hold for one request, None where nothing is limited. Raises TenantLimitError."""
        if allowance.unlimited:
            return None
        self._serial += 1
        name = f"{self._gateway}-{self._serial}"
        try:
            await _or_refuse(self._store.acquire(name, tenant, allowance))
        except TenantLimitError:
            raise
        except BaseException:
            # Perhaps it was given; nobody holds it.
            self.note(Use(name, tenant, ended=True))
            raise
        self._open[name] = Use(name, tenant)
        self._start()
        return Lease(self, name, tenant, allowance)

    async def charge(self, tenant: str, tokens: int, allowance: Allowance) -> None:
        """Raises TenantLimitError where a prompt is too much now."""
        if allowance.tokens_per_minute is not None:
            await _or_refuse(self._store.charge(tenant, tokens, allowance))

    def note(self, use: Use) -> None:
        """Remember what is to be reported; an end is reported at once."""
        before = self._open.pop(use.lease, None)
        tokens = use.tokens + (before.tokens if before is not None else 0)
        acknowledged = before.acknowledged if before is not None else 0
        total = Use(use.lease, use.tenant, tokens, use.ended, acknowledged)
        if use.ended:
            self._ended.append(total)
            self._news.set()
            self._start()
        elif before is not None:
            self._open[use.lease] = total

    async def reported(self) -> None:
        """Returns when what was noted is where the counts are, or cannot be brought there now."""
        done = asyncio.get_running_loop().create_future()
        self._awaited.append(done)
        await done

    async def counts(self) -> dict[str, dict[str, int]]:
        """Of each tenant with limits: requests and tokens of the last minute, requests at once."""
        return await self._store.counts()

    def _start(self) -> None:
        if self._reporter is None or self._reporter.done():
            self._reporter = asyncio.get_running_loop().create_task(self._report())

    async def _report(self) -> None:
        """Until no lease is open and all ends are reported."""
        while self._open or self._ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), RENEW_S)
            self._news.clear()
            ended, self._ended = self._ended, []
            awaited, self._awaited = self._awaited, []
            still = list(self._open.values())
            arrived = False
            try:
                await self._store.report([*still, *ended])
                arrived = True
            # Whatever went wrong, clients wait for this, and the use must not be forgotten.
            except Exception as error:
                unforeseen = not isinstance(error, EngineUnavailableError)
                text = "A report of tenants' use is sent again: %s"
                log.warning(text, error, exc_info=unforeseen)
                self._ended = ended + self._ended
            finally:
                _finish(awaited)
            if arrived:
                self._acknowledge(still)
            else:
                await asyncio.sleep(RENEW_S)

    def _acknowledge(self, arrived: Iterable[Use]) -> None:
        for use in arrived:
            now = self._open.get(use.lease)
            if now is not None:
                self._open[use.lease] = msgspec.structs.replace(now, acknowledged=use.tokens)


def _finish(awaited: list[asyncio.Future[None]]) -> None:
    for done in awaited:
        if not done.done():
            done.set_result(None)


async def _or_refuse(answer: Awaitable[Refusal | None]) -> None:
    refusal = await answer
    if refusal is not None:
        raise TenantLimitError(refusal.message, refusal.retry_after_s)
