"""Whether a tenant's hints may be believed: held against what its texts themselves say."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_TENANTS = 4096
"""Those not heard of for longest are forgotten, and believed again."""
WINDOW = 64
"""Judged hints after which older ones count half."""
LEAST_JUDGED = 16
DISTRUST_SHARE = 0.5
"""Contradicted hints of those judged, above which a tenant's hints are no longer followed."""
RETURN_SHARE = 0.25
"""Below which they are followed again. Hints are judged whether they are followed or not."""


@dataclass(slots=True)
class _Record:
    agreed: float = 0.0
    contradicted: float = 0.0
    trusted: bool = True

    @property
    def share(self) -> float:
        return self.contradicted / max(1.0, self.agreed + self.contradicted)


class HintTrust:
    """Counts agreement and contradiction by tenant; bounded, for this process alone."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def trusts(self, tenant: str) -> bool:
        """Whether the tenant's hints are followed."""
        record = self._records.get(tenant)
        return record is None or record.trusted

    def judge(self, tenant: str, agrees: bool) -> None:
        """A hint was compared with a confident guess of the same text."""
        record = self._records.setdefault(tenant, _Record())
        self._records.move_to_end(tenant)
        if agrees:
            record.agreed += 1
        else:
            record.contradicted += 1
        judged = record.agreed + record.contradicted
        if judged >= LEAST_JUDGED:
            limit = DISTRUST_SHARE if record.trusted else RETURN_SHARE
            record.trusted = record.share <= limit
        if judged >= WINDOW:
            record.agreed /= 2
            record.contradicted /= 2
        if len(self._records) > MAX_TENANTS:
            self._records.popitem(last=False)

    def distrusted(self) -> int:
        """Tenants whose hints are not followed now."""
        return sum(1 for record in self._records.values() if not record.trusted)
