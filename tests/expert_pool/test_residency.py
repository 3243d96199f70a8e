"""Residency against a simple model: who has a slot, who may lose it, quotas that move."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.errors import BudgetError
from expert_pool.eviction_rules import EvictionRules
from expert_pool.policies import LruPolicy
from expert_pool.residency import QUARANTINE_S, Residency
from expert_pool.tables import ResidencyViolation, State

LAYERS, EXPERTS, TOP_K = 3, 5, 2
layer_numbers = st.integers(0, LAYERS - 1)
expert_sets = st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS)


def make_residency(slots: int, clock=lambda: 0.0) -> Residency:
    layers = [
        SimpleNamespace(params=(), slot_bytes=4096, num_experts=EXPERTS, top_k=TOP_K)
        for _ in range(LAYERS)
    ]
    policy = EvictionRules(LruPolicy(LAYERS, EXPERTS), LAYERS, EXPERTS)
    return Residency(layers, slots * 4096, policy, torch.device("cpu"), clock)


class ResidencyMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(LAYERS * TOP_K, LAYERS * EXPERTS))
    def start(self, slots):
        self.residency = make_residency(slots)
        self.total = slots
        self.loading: set[tuple[int, int]] = set()
        self.resident: list[list[int]] = [[] for _ in range(LAYERS)]  # least recent first
        self.pinned: set[tuple[int, int]] = set()

    @rule(layer=layer_numbers, experts=expert_sets)
    def admit(self, layer, experts):
        unloaded = (State.UNLOADED, State.QUARANTINED)
        wanted = [e for e in experts if self.residency.states.state[layer, e] in unloaded]
        held = len(self.resident[layer]) + sum(la == layer for la, _ in self.loading)
        free = self.residency.quotas[layer] - held
        evictable = [e for e in self.resident[layer] if (layer, e) not in self.pinned]
        victims = evictable[: max(0, len(wanted) - free)]
        admitted = self.residency.admit(layer, wanted)
        assert [e for e, _ in admitted] == wanted[: free + len(victims)]
        for victim in victims:
            self.resident[layer].remove(victim)
            assert self.residency.states.state[layer, victim] != State.RESIDENT
        self.loading |= {(layer, e) for e, _ in admitted}

    @rule(data=st.data(), outcome=st.sampled_from(["landed", "failed", "called_off"]))
    def come_in(self, data, outcome):
        if not self.loading:
            return
        pair = data.draw(st.sampled_from(sorted(self.loading)))
        more = {"needed": True} if outcome == "failed" else {}
        getattr(self.residency, outcome)(*pair, **more)
        self.loading.remove(pair)
        if outcome == "landed":
            self.touch(*pair)
        elif outcome == "failed":
            assert self.residency.is_barred(*pair)

    @rule(data=st.data(), layer=layer_numbers)
    def use(self, data, layer):
        if self.resident[layer]:
            self.touch(layer, data.draw(st.sampled_from(sorted(self.resident[layer]))))

    @rule(data=st.data(), layer=layer_numbers)
    def pin_or_unpin(self, data, layer):
        if not self.resident[layer]:
            return
        expert = data.draw(st.sampled_from(sorted(self.resident[layer])))
        if (layer, expert) in self.pinned:
            self.residency.states.unpin(layer, np.array([expert]))
        else:
            self.residency.states.pin(layer, np.array([expert]))
        self.pinned ^= {(layer, expert)}

    @rule(source=layer_numbers, to=layer_numbers, slots=st.integers(0, 3))
    def move_quota(self, source, to, slots):
        target = to
        quotas = list(self.residency.quotas)
        legal = (
            source != target
            and slots >= 1
            and quotas[source] - slots >= TOP_K
            and quotas[target] + slots <= EXPERTS
        )
        held = len(self.resident[source]) + sum(la == source for la, _ in self.loading)
        evictable = [e for e in self.resident[source] if (source, e) not in self.pinned]
        wanted = max(0, slots - (quotas[source] - held))
        if not legal:
            with pytest.raises(BudgetError):
                self.residency.move_quota(source, target, slots)
        elif wanted > len(evictable):
            with pytest.raises(ResidencyViolation):
                self.residency.move_quota(source, target, slots)
        else:
            self.residency.move_quota(source, target, slots)
            quotas[source] -= slots
            quotas[target] += slots
            for victim in evictable[:wanted]:
                self.resident[source].remove(victim)
        assert self.residency.quotas == quotas

    @invariant()
    def the_tables_agree_with_the_model(self):
        if not hasattr(self, "residency"):
            return
        assert sum(self.residency.quotas) == self.total
        states = self.residency.states.state
        for layer in range(LAYERS):
            assert set(np.flatnonzero(states[layer] == State.RESIDENT)) == set(self.resident[layer])
            in_order = self.residency.ordered_from(layer)
            slots = self.residency.addresses.slot_of[layer].tolist()
            if in_order is not None:
                assert len(self.resident[layer]) == EXPERTS
                assert slots == list(range(in_order, in_order + EXPERTS))
        if self.pinned:
            with pytest.raises(ResidencyViolation, match="pins"):
                self.residency.check_invariants()
        else:
            self.residency.check_invariants()

    def touch(self, layer, expert):
        self.residency.policy.touch(layer, np.array([expert]), np.array([1]), 1)
        if expert in self.resident[layer]:
            self.resident[layer].remove(expert)
        self.resident[layer].append(expert)


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_full_layer_lies_in_expert_order_whatever_came_first():
    residency = make_residency(LAYERS * EXPERTS)
    for expert in (3, 0, 4, 1, 2):
        assert residency.ordered_from(1) is None
        residency.admit(1, [expert])
        residency.landed(1, expert)
    assert residency.ordered_from(1) == EXPERTS
    assert residency.addresses.slot_of[1].tolist() == list(range(EXPERTS, 2 * EXPERTS))
    residency.evict_if_idle(1, 3)
    assert residency.ordered_from(1) is None
    residency.admit(1, [3])
    assert residency.ordered_from(1) is None
    residency.landed(1, 3)
    assert residency.ordered_from(1) == EXPERTS


def test_a_quarantined_expert_is_tried_again_after_some_seconds():
    now = [100.0]
    residency = make_residency(LAYERS * TOP_K, clock=lambda: now[0])
    residency.admit(0, [1])
    residency.failed(0, 1, needed=True)
    assert residency.is_barred(0, 1)
    now[0] += QUARANTINE_S - 0.1
    assert residency.is_barred(0, 1)
    now[0] += 0.1
    assert not residency.is_barred(0, 1)
    assert residency.admit(0, [1])
    residency.landed(0, 1)
    assert not residency.is_barred(0, 1)


def test_what_nobody_needed_when_it_could_not_be_read_is_tried_when_somebody_does():
    residency = make_residency(LAYERS * TOP_K, clock=lambda: 100.0)
    residency.admit(0, [1])
    residency.failed(0, 1, needed=False)
    assert residency.states.state[0, 1] == State.QUARANTINED, "no other guess reads it again"
    assert not residency.is_barred(0, 1)
    assert residency.admit(0, [1])


def test_experts_to_keep_are_not_evicted_for_a_preload():
    residency = make_residency(LAYERS * TOP_K)
    for expert, _ in residency.admit(0, [0, 1]):
        residency.landed(0, expert)
    assert residency.admit(0, [2, 3], keep=np.array([0, 1, 2, 3])) == []
    assert [e for e, _ in residency.admit(0, [2, 3], keep=np.array([1, 2, 3]))] == [2]
