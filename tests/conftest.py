"""What must be set before any test imports Ray: its flags are read at import."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile

import pytest

from app.local_ray import prepare_environment

MAX_BODY_BYTES = 1024**2

prepare_environment(MAX_BODY_BYTES)

# What one test run learns of a model must not warm another's start, nor the user's own.
_CACHE = tempfile.mkdtemp(prefix="coterie-test-cache-")
os.environ["COTERIE_CACHE"] = _CACHE
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path_factory):
    """Each test begins without what others learned."""
    monkeypatch.setenv(
        "COTERIE_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{next(_numbers)}")
    )


_numbers = itertools.count()
