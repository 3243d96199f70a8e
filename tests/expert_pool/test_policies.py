import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_pool.policies import LFU_DECAY, LfuPolicy, LruPolicy, make_policy

EXPERTS = 6
uses = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 5), min_size=1),
        st.integers(1, 400),
    ),
    max_size=40,
)
candidate_sets = st.sets(st.integers(0, EXPERTS - 1))


def touch(policy, layer, counts, tokens):
    experts = np.array(sorted(counts), dtype=np.int64)
    policy.touch(layer, experts, np.array([counts[int(e)] for e in experts]), tokens)


@given(uses, candidate_sets, st.integers(0, EXPERTS))
def test_lru_evicts_what_was_used_longest_ago(history, candidates, number):
    policy = LruPolicy(2, EXPERTS)
    last_use = {(layer, e): -1 for layer in range(2) for e in range(EXPERTS)}
    for now, (layer, counts, tokens) in enumerate(history):
        touch(policy, layer, counts, tokens)
        for expert in counts:
            last_use[layer, expert] = now
    for layer in range(2):
        got = policy.victims(layer, np.array(sorted(candidates), dtype=np.int64), number)
        expected = sorted(candidates, key=lambda e, la=layer: (last_use[la, e], e))
        assert got.tolist() == expected[:number]


@given(uses, candidate_sets, st.integers(0, EXPERTS))
def test_lfu_counts_decay_by_the_tokens_of_their_layer(history, candidates, number):
    policy = LfuPolicy(2, EXPERTS)
    counts_of = {(layer, e): 0.0 for layer in range(2) for e in range(EXPERTS)}
    for layer, counts, tokens in history:
        touch(policy, layer, counts, tokens)
        for expert in range(EXPERTS):
            counts_of[layer, expert] *= LFU_DECAY**tokens
            counts_of[layer, expert] += counts.get(expert, 0)
    for (layer, expert), count in counts_of.items():
        assert policy.count(layer, expert) == pytest.approx(count, rel=1e-6, abs=1e-12)
    for layer in range(2):
        got = policy.victims(layer, np.array(sorted(candidates), dtype=np.int64), number).tolist()
        assert len(got) == min(number, len(candidates))
        evicted = [counts_of[layer, e] for e in got]
        kept = [counts_of[layer, e] for e in candidates - set(got)]
        assert evicted == pytest.approx(sorted(evicted), rel=1e-6, abs=1e-12)
        if evicted and kept:
            assert max(evicted) <= min(kept) * (1 + 1e-6) + 1e-12


def test_lfu_survives_more_tokens_than_a_float_can_scale():
    policy = LfuPolicy(1, 2)
    for _ in range(3000):
        touch(policy, 0, {0: 1}, 7)
    touch(policy, 0, {1: 3}, 1)
    assert policy.count(0, 0) == pytest.approx(LFU_DECAY / (1 - LFU_DECAY**7), rel=1e-6)
    touch(policy, 0, {1: 1}, 1_000_000)
    assert policy.count(0, 0) == 0
    assert policy.count(0, 1) == 1


def test_lfu_keeps_the_frequent_where_lru_keeps_the_recent():
    assert LFU_DECAY == 0.95
    lru, lfu = make_policy("lru", 1, 3), make_policy("lfu", 1, 3)
    for policy in (lru, lfu):
        for chosen in (0, 0, 0, 1, 2):
            touch(policy, 0, {chosen: 1}, 1)
    everyone = np.arange(3)
    assert lru.victims(0, everyone, 1).tolist() == [0]
    assert lfu.victims(0, everyone, 1).tolist() == [1]


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="lru, lfu"):
        make_policy("mru", 1, 1)
