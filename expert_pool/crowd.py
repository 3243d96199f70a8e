"""Steps that ask a layer for more experts than it has slots: who is read when, and who stays."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from expert_pool.tables import IntArray


class Ranking(Protocol):
    """The part of a policy that is asked here."""

    def victims(self, layer: int, candidates: IntArray, number: int) -> IntArray:
        """As `Policy.victims`."""


def crowded_order(
    ranking: Ranking,
    layer: int,
    hits: IntArray,
    missing: IntArray,
    idle: IntArray,
    room: int,
    hot: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """(the order in which to read `missing`, who leaves for them in which order).

    `hits` and `missing` are what the step asks for, `idle` residents that it does not, `room` the
    layer's slots but for those of hot experts that are idle. A quarter of them is passed through;
    in the others, those stay or come last that the policy ranks highest. Who leaves: the idle, then
    hits that do not stay, then others as they were read. `hot` ones never leave.
    """
    asked = np.sort(np.concatenate((hits, missing)))
    ranked = ranking.victims(layer, asked, asked.size)
    stays = room - max(1, room // 4)
    if hot is not None:
        is_hot = np.isin(ranked, hot)
        ranked = np.concatenate((ranked[~is_hot], ranked[is_hot]))
        stays = max(stays, int(np.count_nonzero(is_hot)))
    go, stay = ranked[: ranked.size - stays], ranked[ranked.size - stays :]
    read_first = go[np.isin(go, missing)]
    order = np.concatenate((read_first, stay[np.isin(stay, missing)]))
    leavers = (
        ranking.victims(layer, idle, idle.size),
        go[np.isin(go, hits)],
        read_first,
    )
    return order, np.concatenate(leavers)
