"""How many experts a sequence would add to those that the running ones use, as far as is foreseen.

A signature holds, for each (layer, expert), the share of a sequence's tokens that choose it. Taken
as independent, an expert is used by none of the running ones with the product of (1 - share) over
them; what a candidate adds is the sum of that times its own shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from core.request import Request

FloatArray = npt.NDArray[np.float32]
SignatureOf = Callable[[Request], npt.NDArray[np.floating] | None]

MOST_CELLS: Final = 8192
"""(layer, expert) pairs that are looked at; of models with more, every so manyth layer."""


class Member(Protocol):
    """A waiting or running sequence, as far as its order is concerned."""

    @property
    def sequence_id(self) -> int:
        """Rises with arrival."""

    @property
    def request(self) -> Request:
        """Of which it is a part."""


class Overlap:
    """Keeps a signature for each sequence it was asked about, until it is told to forget it."""

    def __init__(self, signature: SignatureOf) -> None:
        """`signature` gives [layers, experts], None where nothing is known; it is asked once for
        each sequence."""
        self._signature = signature
        self._known: dict[int, FloatArray | None] = {}
        self._unused: FloatArray | None = None
        """Chance that none of `_members` uses an expert."""
        self._members: frozenset[int] = frozenset()

    def added(self, candidates: Ordered[Member], running: Iterable[Member]) -> FloatArray:
        """[candidates]: share of what each uses that it would add.

        One of whom nothing is known counts as the mean of the others; all 0 where nothing is known
        of anybody, or nothing runs.
        """
        shares = np.zeros(len(candidates), dtype=np.float32)
        unused = self._unused_by(list(running))
        known = [(at, s) for at, c in enumerate(candidates) if (s := self._of(c)) is not None]
        if unused is None or not known:
            return shares
        places = [at for at, _ in known]
        signatures = np.stack([signature for _, signature in known])
        found = signatures @ unused / signatures.sum(axis=1)
        shares += found.mean()
        shares[places] = found
        return shares

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        self._known.pop(sequence_id, None)

    def _of(self, member: Member) -> FloatArray | None:
        number = member.sequence_id
        if number not in self._known:
            found = self._signature(member.request)
            if found is not None:
                found = np.clip(np.nan_to_num(_flat(found)), 0.0, 1.0)
                found = found if found.any() else None
            self._known[number] = found
        return self._known[number]

    def _unused_by(self, running: Ordered[Member]) -> FloatArray | None:
        members = frozenset(member.sequence_id for member in running)
        if not self._members <= members:
            self._unused, self._members = None, frozenset()
        for member in running:
            if member.sequence_id in self._members:
                continue
            signature = self._of(member)
            if signature is not None:
                left = 1.0 - signature
                self._unused = left if self._unused is None else self._unused * left
        self._members = members
        return self._unused


def _flat(by_layer: npt.NDArray[np.floating]) -> FloatArray:
    """The layers that are looked at, one after another."""
    every = -(-by_layer.size // MOST_CELLS)
    return by_layer[::every].astype(np.float32).ravel()
