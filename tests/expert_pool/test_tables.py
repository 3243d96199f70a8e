import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from expert_pool.tables import AddressTable, ResidencyViolation, State, StateTable

LAYERS, EXPERTS = 2, 3
experts_of = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1))
MOVES = {
    "start_loading": ({State.UNLOADED, State.QUARANTINED}, State.LOADING),
    "finish_loading": ({State.LOADING}, State.RESIDENT),
    "fail_loading": ({State.LOADING}, State.QUARANTINED),
    "cancel_loading": ({State.LOADING}, State.UNLOADED),
    "evict": ({State.RESIDENT}, State.UNLOADED),
}


class StateTableMachine(RuleBasedStateMachine):
    """The state table against a dict; what the dict forbids must raise and change nothing."""

    @initialize()
    def start(self):
        self.table = StateTable([EXPERTS] * LAYERS)
        self.states = {(la, e): State.UNLOADED for la in range(LAYERS) for e in range(EXPERTS)}
        self.pins = dict.fromkeys(self.states, 0)

    @rule(pair=experts_of, move=st.sampled_from(sorted(MOVES)))
    def move(self, pair, move):
        allowed, to = MOVES[move]
        legal = self.states[pair] in allowed and not (move == "evict" and self.pins[pair])
        if legal:
            getattr(self.table, move)(*pair)
            self.states[pair] = to
        else:
            with pytest.raises(ResidencyViolation):
                getattr(self.table, move)(*pair)
        self.compare()

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1)))
    def pin(self, layer, experts):
        chosen = np.array(sorted(experts), dtype=np.int64)
        if all(self.states[layer, e] == State.RESIDENT for e in experts):
            self.table.pin(layer, chosen)
            for expert in experts:
                self.pins[layer, expert] += 1
        else:
            with pytest.raises(ResidencyViolation):
                self.table.pin(layer, chosen)
        self.compare()

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1)))
    def unpin(self, layer, experts):
        chosen = np.array(sorted(experts), dtype=np.int64)
        if all(self.pins[layer, e] for e in experts):
            self.table.check_pinned(layer, chosen)
            self.table.unpin(layer, chosen)
            for expert in experts:
                self.pins[layer, expert] -= 1
        else:
            with pytest.raises(ResidencyViolation):
                self.table.check_pinned(layer, chosen)
            with pytest.raises(ResidencyViolation):
                self.table.unpin(layer, chosen)
        self.compare()

    def compare(self):
        for (layer, expert), state in self.states.items():
            assert self.table.state[layer, expert] == state
            assert self.table.pins[layer, expert] == self.pins[layer, expert]
        for layer in range(LAYERS):
            resident = [e for e in range(EXPERTS) if self.states[layer, e] == State.RESIDENT]
            assert self.table.resident_counts[layer] == len(resident)
            free = [e for e in resident if not self.pins[layer, e]]
            assert self.table.evictable(layer).tolist() == free


TestStateTable = StateTableMachine.TestCase


@given(
    st.lists(
        st.tuples(st.booleans(), experts_of, st.integers(0, 3)),
        max_size=60,
    )
)
def test_the_address_table_is_a_one_to_one_map(steps):
    arena_of_layer = [0, 1]
    table = AddressTable([EXPERTS] * LAYERS, arena_of_layer, [4, 4])
    slots: dict[tuple[int, int], int] = {}
    for bind, pair, slot in steps:
        layer = pair[0]
        taken = {s for (la, _), s in slots.items() if la == layer}
        if bind:
            if pair in slots or slot in taken:
                with pytest.raises(ResidencyViolation):
                    table.bind(*pair, slot)
            else:
                table.bind(*pair, slot)
                slots[pair] = slot
        elif pair in slots:
            assert table.release(*pair) == slots.pop(pair)
        else:
            with pytest.raises(ResidencyViolation):
                table.release(*pair)
        for la in range(LAYERS):
            known = np.array([e for e in range(EXPERTS) if (la, e) in slots], dtype=np.int64)
            assert table.lookup(la, known).tolist() == [slots[la, int(e)] for e in known]
            for slot_number in range(4):
                owners = [p for p, s in slots.items() if p[0] == la and s == slot_number]
                assert table.owner(arena_of_layer[la], slot_number) == next(iter(owners), None)


def test_a_stale_address_is_refused():
    table = AddressTable([2], [0], [2])
    table.bind(0, 0, 1)
    table.slot_of[0, 1] = 1  # as a stale copy would claim
    with pytest.raises(ResidencyViolation, match="not its own"):
        table.lookup(0, np.array([1]))
    with pytest.raises(ResidencyViolation):
        table.lookup(0, np.array([0, 1]))
