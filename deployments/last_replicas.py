"""Which replicas computed the beginning of a prompt of late, and which ones served a session."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

PREFIX_TOKENS = 64
"""The first hash of a prompt covers so many tokens, each further one twice as many."""
_MOST_HASHES = 12
_MOST_REPLICAS = 4
"""Remembered of one key: a beginning that all prompts share lies on many."""


def prefix_hashes(prompt_ids: Sequence[int], tenant: str) -> tuple[int, ...]:
    """Hashes of a prompt's first 64, 128, 256, ... tokens, as far as there are as many.

    Tenants share no prefixes, so none of their hashes are equal either.
    """
    hashes: list[int] = []
    running = hashlib.blake2b(tenant.encode(), digest_size=8)
    done, upto = 0, PREFIX_TOKENS
    while upto <= len(prompt_ids) and len(hashes) < _MOST_HASHES:
        running.update(array("q", prompt_ids[done:upto]).tobytes())
        hashes.append(int.from_bytes(running.copy().digest(), "big"))
        done, upto = upto, 2 * upto
    return tuple(hashes)


def prefix_tokens(position: int) -> int:
    """Tokens that the hash at `position` covers."""
    return PREFIX_TOKENS << position


class LastReplicas:
    """Keys (prefix hashes, sessions) with the replicas each went to; bounded, oldest out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: OrderedDict[object, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def remember(self, key: object, replica: str, mark: float) -> None:
        """`mark` comes back with the replica: what it had served by then."""
        marks = self._last.setdefault(key, {})
        marks.pop(replica, None)
        marks[replica] = mark
        if len(marks) > _MOST_REPLICAS:
            del marks[next(iter(marks))]
        self._last.move_to_end(key)
        if len(self._last) > self._most:
            self._last.popitem(last=False)

    def of(self, key: object) -> Mapping[str, float]:
        """The mark of each replica, the last one's at the end; none where the key is not known."""
        return self._last.get(key, {})

    def last(self, key: object) -> str | None:
        """The replica that it went to last."""
        return next(reversed(self._last.get(key, {})), None)
