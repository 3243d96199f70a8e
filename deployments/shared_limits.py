"""The counts of several gateways in one Serve deployment, through its handle."""

from __future__ import annotations

import asyncio
from typing import Any

from core.errors import EngineUnavailableError, OverloadedError
from deployments.supervisor_client import translated
from deployments.tenant_limits import Allowance, Refusal, Use

_ANSWER_S = 5.0


class SharedLimits:
    """A LimitsStore far away. Raises EngineUnavailableError where it does not answer."""

    def __init__(self, handle: Any) -> None:
        by_value = handle.options(_by_reference=False)
        names = ("acquire", "charge", "report", "counts")
        self._methods = {name: by_value.options(method_name=name) for name in names}

    async def acquire(self, lease: str, tenant: str, allowance: Allowance) -> Refusal | None:
        """See TenantLimits."""
        return await self._call("acquire", lease, tenant, allowance)

    async def charge(self, tenant: str, tokens: int, allowance: Allowance) -> Refusal | None:
        """See TenantLimits."""
        return await self._call("charge", tenant, tokens, allowance)

    async def report(self, uses: list[Use]) -> None:
        """See TenantLimits."""
        await self._call("report", uses)

    async def counts(self) -> dict[str, dict[str, int]]:
        """See TenantLimits."""
        return await self._call("counts")

    async def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return await asyncio.wait_for(self._methods[name].remote(*arguments), _ANSWER_S)
        except Exception as error:
            away = TimeoutError | EngineUnavailableError | OverloadedError
            if not isinstance(translated(error), away):
                raise
            # Limits that cannot be checked are not passed over.
            text = "The tenants' limits cannot be checked now."
            raise EngineUnavailableError(text) from error
