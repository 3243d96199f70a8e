"""Bytes are parsed once, at the edge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config_model import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "want"),
    [("8GiB", 8 << 30), ("2GB", 2 * 10**9), ("1.5 MiB", 3 << 19), ("17", 17), (17, 17), ("3B", 3)],
)
def test_parse_bytes(text: str | int, want: int) -> None:
    assert parse_bytes(text) == want


@pytest.mark.parametrize("text", ["8 gigs", "-1GiB", "", "GiB", True, None, 1.5, "1e9"])
def test_parse_bytes_refuses(text: object) -> None:
    with pytest.raises(ValueError, match="expected bytes"):
        parse_bytes(text)


@given(st.integers(0, 1 << 42))
def test_format_then_parse_is_close(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.06, abs=1)
