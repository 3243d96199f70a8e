"""Where Coterie keeps what it learns."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from core.cache_folder import cache_folder


def test_the_folder_that_is_named_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", "/somewhere/kept")
    assert cache_folder() == Path("/somewhere/kept")


def test_whoever_has_no_home_still_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("COTERIE_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert cache_folder() == Path(tempfile.gettempdir()) / f"coterie-{os.getuid()}"
