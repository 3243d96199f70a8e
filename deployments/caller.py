"""Who sends a request, and until when they want its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """What the HTTP headers say about a request; its body says the rest."""

    tenant: str = ""
    deadline_s: float | None = None
    """Wall-clock seconds since the epoch."""


NOBODY = Caller()
"""Where there are no tenants and no deadline."""
