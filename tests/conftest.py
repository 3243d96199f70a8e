"""What must be set before any test imports Ray: its flags are read at import."""

from __future__ import annotations

from app.local_ray import prepare_environment

MAX_BODY_BYTES = 1024**2

prepare_environment(MAX_BODY_BYTES)
