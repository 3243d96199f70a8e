"""Steps with more experts than slots."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expert_pool.crowd import crowded_order
from expert_pool.policies import LfuPolicy

EXPERTS = 12


@given(
    asked=st.sets(st.integers(0, EXPERTS - 1), min_size=3),
    here=st.sets(st.integers(0, EXPERTS - 1)),
    hot=st.sets(st.integers(0, EXPERTS - 1), max_size=2),
    room=st.integers(3, 8),
    seed=st.integers(0, 9),
)
def test_slots_always_come_free_in_time_and_the_best_stay(asked, here, hot, room, seed):
    room = min(room, len(asked) - 1)
    hot = set(sorted(hot)[: room - 1])
    draw = np.random.default_rng(seed)
    policy = LfuPolicy(1, EXPERTS)
    policy.touch(0, np.arange(EXPERTS), draw.permutation(EXPERTS), 1)
    here = set(draw.permutation(sorted(here))[:room].tolist()) - (hot - asked)
    hits, missing, idle = asked & here, asked - here, here - asked
    order, leavers = crowded_order(
        policy,
        0,
        *(np.array(sorted(some), dtype=np.int64) for some in (hits, missing, idle)),
        room,
        np.array(sorted(hot), dtype=np.int64),
    )
    assert sorted(order.tolist()) == sorted(missing)
    assert set(leavers.tolist()).isdisjoint(hot)
    assert set(leavers.tolist()[: len(idle)]) == idle
    # Played through, reads at once: whoever leaves is here, and has been computed or is not asked.
    held, queue = set(here), leavers.tolist()
    for expert in order.tolist():
        if len(held) == room:
            left = queue.pop(0)
            assert left in held
            held.remove(left)
        held.add(expert)
    assert len(held) <= room
    stay = sorted(asked - hot, key=lambda e: (policy.count(0, e), e))
    kept = max(0, room - max(1, room // 4) - len(asked & hot))
    assert set(stay[len(stay) - kept :]) <= held
    assert hot & asked <= held
