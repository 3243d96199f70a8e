"""What travels beside a request's bytes to the router, which never looks into those.

The router runs in the gateway's process, yet in Serve's machinery, which knows arguments alone.
"""

from __future__ import annotations

import msgspec

from deployments.dispatcher import Ask
from deployments.last_replicas import prefix_hashes
from deployments.text_delta import Generation


class RoutedAsk(msgspec.Struct, frozen=True, array_like=True):
    """An `Ask` and the request it is of: one offered again goes to another replica."""

    request_id: str
    ask: Ask


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RoutedAsk)


def encode_ask(generation: Generation) -> bytes:
    """Of a request on its way."""
    request = generation.request
    ask = Ask(
        prompt_tokens=len(request.prompt_ids),
        max_tokens=request.params.max_tokens,
        domain=request.domain,
        confidence=generation.confidence,
        session=request.session,
        tenant=request.tenant,
        prefix=prefix_hashes(request.prompt_ids, request.tenant),
        sequences=request.n,
    )
    return _encoder.encode(RoutedAsk(request.request_id, ask))


def decode_ask(data: object) -> RoutedAsk | None:
    """The inverse; None for what is no encoded ask: other calls than `generate` carry none."""
    if not isinstance(data, bytes) or not data:
        return None
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
