"""Which processes of this machine serve a loopback URL: their work is not other work."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import psutil


def serving_roots(url: str) -> tuple[int, ...]:
    """The topmost process ids behind a URL of this machine; none where that cannot be told.

    From the process that listens upwards as far as no ancestor of ours is reached.
    """
    parts = urlsplit(url)
    if not _is_loopback(parts.hostname or ""):
        return ()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    shared = {1, *(process.pid for process in psutil.Process().parents()), psutil.Process().pid}
    roots = set()
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.pid:
                continue
            # A tuple of address and port; the union of psutil's types knows an empty one too.
            if tuple(connection.laddr)[1:2] == (port,):
                listener = psutil.Process(connection.pid)
                chain = [listener, *listener.parents()]
                roots.update([x.pid for x in chain if x.pid not in shared][-1:])
    except psutil.Error:
        return ()
    return tuple(sorted(roots))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
