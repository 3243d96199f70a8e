"""Which regular expressions a grammar holds to. What a compiler would drop is refused here."""

from __future__ import annotations

import re
from typing import Any

from core.errors import RequestError

MAX_PATTERN_CHARS = 4096
_ESCAPES = re.compile(r"[1-9bBAZzGkpPQEK]")


def check_pattern(pattern: Any, path: str) -> None:
    """Raises RequestError for a pattern with look-around, references or inner anchors.

    The whole text is matched, so anchors may stand at the ends of the outermost alternatives only.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise _refusal(path, f"a text of at most {MAX_PATTERN_CHARS} characters")
    depth, at, size = 0, 0, len(pattern)
    begins = True
    """Whether an outermost alternative begins here."""
    while at < size:
        letter = pattern[at]
        if letter == "\\":
            if _ESCAPES.match(pattern, at + 1):
                raise _refusal(path, f"no {pattern[at : at + 2]} in it")
            at += 1
        elif letter == "[":
            at = _class_end(pattern, at)
        elif letter == "(":
            if pattern.startswith("(?", at) and not pattern.startswith("(?:", at):
                raise _refusal(path, "no look-around, named groups or flags in it")
            depth += 1
        elif letter == ")":
            depth -= 1
        elif letter == "^" and not begins:
            raise _refusal(path, "^ at its beginning only")
        elif letter == "$" and (depth or (at + 1 < size and pattern[at + 1] != "|")):
            raise _refusal(path, "$ at its end only")
        begins = letter == "|" and depth == 0
        at += 1


def _class_end(pattern: str, at: int) -> int:
    """Index of the "]" that ends the character class begun at `at`; the last index if none."""
    at += 2 if pattern.startswith("[^", at) else 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at


def _refusal(path: str, expected: str) -> RequestError:
    return RequestError(f"Unsupported regular expression at {path[:200]}: expected {expected}.")
