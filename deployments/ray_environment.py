"""Environment variables that Ray's processes must find when they start. No Ray import here."""

from __future__ import annotations

from pathlib import Path

from core.torch_environment import TORCH_ENVIRONMENT

MAX_BODY_VARIABLE = "COTERIE_PROXY_MAX_BODY_BYTES"
"""Body limit at the HTTP proxy, in bytes; the gateway has its own from the settings."""

KEYS_VARIABLE = "COTERIE_API_KEYS"
"""API keys separated by commas: KEY, TENANT:KEY, sha256:DIGEST or TENANT:sha256:DIGEST."""

SERVE_ENVIRONMENT = {
    # Serve's flags are read when it is imported, in every process: streams of single tokens are
    # several times faster with the first one; the second keeps HTTP at the proxy, on one port.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    # The first flag leaves the proxy out; this takes it from object references to gRPC as well.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # What the proxy itself would do with a request's headers and body is decided before it.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy_guard:middlewares",
    # Ray starts workers at niceness 15, behind everything else on the machine; ours answer people.
    "RAY_worker_niceness": "0",
    **TORCH_ENVIRONMENT,
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Needed on every node before `ray start`."""


def source_folder() -> str:
    """The folder that holds the rooms; Ray's processes need it on PYTHONPATH."""
    return str(Path(__file__).resolve().parent.parent)
