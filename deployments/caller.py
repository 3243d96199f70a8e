"""Who sends a request, and until when they want its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """What the HTTP headers say about a request; its body says the rest."""

    tenant: str = ""
    deadline_s: float | None = None
    """Wall-clock seconds since the epoch."""
    domain_hint: str = ""
    """What the client says that the text is about; "" where it says nothing."""
    session_id: str = ""
    """The client's own name of a conversation. It is hashed before it leaves the gateway."""


NOBODY = Caller()
"""Where there are no tenants and no deadline."""
