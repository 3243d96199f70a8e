"""Where every expert is: flat arrays by (layer, expert), and the rules they keep.

A slot is written only while its expert is LOADING, read only while its expert is pinned, and
reused only at pin count 0. Every transition is checked and a breach raises: a wrong slot would
otherwise be a wrong answer that nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from core.errors import CoterieError

IntArray = npt.NDArray[np.int64]


class ResidencyViolation(CoterieError):
    """The pool broke one of its own rules about slots. A bug; the step fails, none is garbled."""


class State(IntEnum):
    """Where an expert's bytes are."""

    UNLOADED = 0
    LOADING = 1
    RESIDENT = 2
    QUARANTINED = 3
    """Its bytes failed twice (read error or checksum); not asked for again for some seconds."""


_NAMES = {int(state): state.name for state in State}
_RESIDENT = int(State.RESIDENT)


class StateTable:
    """State and pin count of every expert."""

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        shape = (len(experts_per_layer), max(experts_per_layer, default=0))
        self.experts_per_layer = tuple(experts_per_layer)
        self.state = np.zeros(shape, dtype=np.int8)
        self.pins = np.zeros(shape, dtype=np.int16)
        self.resident_counts = [0] * shape[0]

    def is_resident(self, layer: int, experts: IntArray) -> npt.NDArray[np.bool_]:
        """Which of `experts` are RESIDENT."""
        return self.state[layer][experts] == _RESIDENT

    def is_whole(self, layer: int) -> bool:
        """Every expert of a layer is RESIDENT."""
        return self.resident_counts[layer] == self.experts_per_layer[layer]

    def evictable(self, layer: int) -> IntArray:
        """RESIDENT experts of a layer that nobody has pinned, in ascending order."""
        mask = (self.state[layer] == _RESIDENT) & (self.pins[layer] == 0)
        return np.flatnonzero(mask)

    def holders(self, layer: int) -> IntArray:
        """Experts of a layer that are RESIDENT or LOADING, in ascending order."""
        row = self.state[layer]
        return np.flatnonzero((row == _RESIDENT) | (row == State.LOADING))

    def start_loading(self, layer: int, expert: int) -> None:
        """UNLOADED or QUARANTINED to LOADING."""
        self._move(layer, expert, (State.UNLOADED, State.QUARANTINED), State.LOADING)

    def finish_loading(self, layer: int, expert: int) -> None:
        """LOADING to RESIDENT."""
        self._move(layer, expert, (State.LOADING,), State.RESIDENT)
        self.resident_counts[layer] += 1

    def fail_loading(self, layer: int, expert: int) -> None:
        """LOADING to QUARANTINED."""
        self._move(layer, expert, (State.LOADING,), State.QUARANTINED)

    def cancel_loading(self, layer: int, expert: int) -> None:
        """LOADING to UNLOADED, for a read that had not begun."""
        self._move(layer, expert, (State.LOADING,), State.UNLOADED)

    def evict(self, layer: int, expert: int) -> None:
        """RESIDENT to UNLOADED, at pin count 0 only."""
        if self.pins[layer, expert] != 0:
            raise ResidencyViolation(
                f"layer {layer} expert {expert}: expected pin count 0 to reuse its slot, "
                f"found {self.pins[layer, expert]}"
            )
        self._move(layer, expert, (State.RESIDENT,), State.UNLOADED)
        self.resident_counts[layer] -= 1

    def pin(self, layer: int, experts: IntArray) -> None:
        """Hold distinct RESIDENT experts in their slots while they are computed with."""
        if not self.is_whole(layer) and not self.is_resident(layer, experts).all():
            states = self.state[layer][experts]
            at = int(np.argmax(states != _RESIDENT))
            raise ResidencyViolation(
                f"layer {layer} expert {experts[at]}: expected RESIDENT to compute with it, "
                f"found {_NAMES[int(states[at])]}"
            )
        self.pins[layer][experts] += 1

    def unpin(self, layer: int, experts: IntArray) -> None:
        """Let go of what `pin` held."""
        left = self.pins[layer][experts] - 1
        if left.size and np.minimum.reduce(left) < 0:
            at = int(np.argmin(left))
            raise ResidencyViolation(f"layer {layer} expert {experts[at]}: unpinned but not pinned")
        self.pins[layer][experts] = left

    def check_pinned(self, layer: int, experts: IntArray) -> None:
        """Raise unless each of `experts` is pinned: the licence to read its slot."""
        pins = self.pins[layer][experts]
        if pins.size and np.minimum.reduce(pins) < 1:
            raise ResidencyViolation(
                f"layer {layer} expert {experts[int(np.argmin(pins))]}: "
                "its slot may be read only while pinned"
            )

    def _move(self, layer: int, expert: int, allowed: tuple[State, ...], to: State) -> None:
        now = int(self.state[layer, expert])
        if now not in allowed:
            raise ResidencyViolation(
                f"layer {layer} expert {expert}: expected "
                f"{' or '.join(state.name for state in allowed)} before {to.name}, "
                f"found {_NAMES[now]}"
            )
        self.state[layer, expert] = to


class AddressTable:
    """Which slot of its layer's arena holds an expert, and back."""

    def __init__(
        self,
        experts_per_layer: Sequence[int],
        arena_of_layer: Sequence[int],
        arena_capacities: Sequence[int],
    ) -> None:
        shape = (len(experts_per_layer), max(experts_per_layer, default=0))
        self.arena_of_layer = tuple(arena_of_layer)
        self.slot_of = np.full(shape, -1, dtype=np.int32)
        self._owner = [np.full(capacity, -1, dtype=np.int32) for capacity in arena_capacities]
        self._width = shape[1]

    def owner(self, arena: int, slot: int) -> tuple[int, int] | None:
        """The (layer, expert) that a slot belongs to now."""
        key = int(self._owner[arena][slot])
        return None if key < 0 else divmod(key, self._width)

    def bind(self, layer: int, expert: int, slot: int) -> None:
        """Give a free slot to an expert that has none."""
        owners = self._owner[self.arena_of_layer[layer]]
        if owners[slot] >= 0:
            raise ResidencyViolation(
                f"slot {slot} given to layer {layer} expert {expert} while it belongs to "
                f"layer, expert {divmod(int(owners[slot]), self._width)}"
            )
        if self.slot_of[layer, expert] >= 0:
            raise ResidencyViolation(f"layer {layer} expert {expert} already has a slot")
        owners[slot] = layer * self._width + expert
        self.slot_of[layer, expert] = slot

    def release(self, layer: int, expert: int) -> int:
        """Take an expert's slot away and return it."""
        slot = int(self.slot_of[layer, expert])
        if slot < 0:
            raise ResidencyViolation(f"layer {layer} expert {expert} has no slot to release")
        self._owner[self.arena_of_layer[layer]][slot] = -1
        self.slot_of[layer, expert] = -1
        return slot

    def lookup(self, layer: int, experts: IntArray) -> IntArray:
        """Slots of `experts`; raises if one has none, or its slot belongs to another by now."""
        slots = self.slot_of[layer][experts].astype(np.int64)
        owners = self._owner[self.arena_of_layer[layer]]
        stale = (slots < 0) | (owners[slots] != experts + layer * self._width)
        if np.logical_or.reduce(stale):
            at = int(np.argmax(stale))
            raise ResidencyViolation(
                f"layer {layer} expert {experts[at]}: slot {slots[at]} is not its own"
            )
        return slots
