"""Keeps the replicas' internal ports on their node's own address.

Serve gives every replica a gRPC port on all interfaces that unpickles what it is sent, without
any authentication. Peers reach a replica by its node's address alone, so that is where the port
belongs: on a local Ray that is loopback, in a cluster the private network.
"""

from __future__ import annotations

import sys
from typing import Any

_EVERYWHERE = ("[::]:", "0.0.0.0:")


def listen_on_node_address_only() -> None:
    """Call in a replica's constructor: Serve opens the port after it. No-op outside of Serve."""
    replica: Any = sys.modules.get("ray.serve._private.replica")
    if replica is None:
        return
    import ray

    if not ray.is_initialized():
        return
    node = ray.util.get_node_ip_address()
    host = f"[{node}]" if ":" in node else node
    add_port = replica.add_port_to_grpc_server

    def add_port_of_node(server: Any, address: str) -> int:
        for everywhere in _EVERYWHERE:
            if address.startswith(everywhere):
                address = f"{host}:{address.removeprefix(everywhere)}"
        return int(add_port(server, address))

    replica.add_port_to_grpc_server = add_port_of_node
