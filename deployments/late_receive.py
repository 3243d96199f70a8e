"""Serve's listening for a disconnect begins a moment late where the body is there already.

Serve's replica asks the proxy for a request's further events by an actor call before it calls the
application. With the whole body in the scope (`proxy_guard.SCOPE_BODY`) the only event left is the
client's leaving, and the call costs a millisecond of the first token's time. So it waits until
the request is on its way; the proxy keeps what happens meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any

from deployments.proxy_guard import SCOPE_BODY

LISTEN_AFTER_S = 0.02


def listen_late() -> None:
    """Call in an ingress replica's constructor. Serve's class is private: 2.60 has it so."""
    from ray.serve._private.http_util import ASGIReceiveProxy

    if getattr(ASGIReceiveProxy, "_listens_late", False):
        return
    fetch = ASGIReceiveProxy.fetch_until_disconnect
    construct = ASGIReceiveProxy.__init__

    def init(self: Any, scope: Any, *arguments: Any, **named: Any) -> None:
        construct(self, scope, *arguments, **named)
        self._has_whole_body = SCOPE_BODY in scope

    async def fetch_until_disconnect(self: Any) -> None:
        if self._has_whole_body:
            await asyncio.sleep(LISTEN_AFTER_S)
        await fetch(self)

    ASGIReceiveProxy.__init__ = init
    ASGIReceiveProxy.fetch_until_disconnect = fetch_until_disconnect
    ASGIReceiveProxy._listens_late = True
