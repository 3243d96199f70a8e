"""Environment variables that torch's libraries read once, when they are loaded. No torch here."""

from __future__ import annotations

import os

TORCH_ENVIRONMENT = {
    # OpenMP threads that spin while they wait cost 10-30 times where cores are shared.
    "OMP_WAIT_POLICY": "passive",
    # oneDNN keeps what it compiled for each shape of a bf16 product, 0.4-0.7 MB each, in two caches
    # of 1,024 entries. Numbers of rows differ in every step: a server would grow by a GB.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}


def unset_variables() -> dict[str, str]:
    """Those that the user has not set."""
    return {name: value for name, value in TORCH_ENVIRONMENT.items() if name not in os.environ}


def prepare_torch() -> None:
    """Sets them where the user has not. Call before torch is imported."""
    os.environ.update(unset_variables())
