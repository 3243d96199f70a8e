"""Who is where: slots, quotas and states of one pool, moved together.

Only the step thread calls this. Bytes are moved by the store, between `admit` and `landed`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from core.errors import BudgetError
from expert_pool.eviction_rules import EvictionRules
from expert_pool.quotas import QuotaKeeper
from expert_pool.slots import SlotArena, share_out
from expert_pool.tables import AddressTable, IntArray, ResidencyViolation, State, StateTable

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import LayerSpec

QUARANTINE_S = 5.0
"""An expert that could not be read twice is not tried again for so long."""


class Residency:
    """States, addresses, quotas and free slots of all layers."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        budget_bytes: int,
        policy: EvictionRules,
        device: torch.device,
        clock: Callable[[], float],
        hot_set: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Reserves the slots. Raises BudgetError where the budget or the machine is too small.

        Experts of `hot_set`, by layer, are never evicted.
        """
        self.layers = tuple(layers)
        self.policy = policy
        self.quotas = share_out(layers, budget_bytes)
        self.hot = _checked_hot_set(hot_set or {}, layers, self.quotas)
        self.floors = [
            layer.top_k + (self.hot[at].size if at in self.hot else 0)
            for at, layer in enumerate(layers)
        ]
        """Slots that each layer keeps: its hot experts', and top_k for all others."""
        self.quota_keeper: QuotaKeeper | None = None
        self.evictions = 0
        self._clock = clock
        shapes = list(dict.fromkeys((layer.params, layer.slot_bytes) for layer in layers))
        arena_of_layer = [shapes.index((layer.params, layer.slot_bytes)) for layer in layers]
        capacities = [0] * len(shapes)
        self._slots: list[list[int]] = []
        for arena, quota in zip(arena_of_layer, self.quotas, strict=True):
            self._slots.append(list(range(capacities[arena], capacities[arena] + quota)))
            capacities[arena] += quota
        self._free = [list(slots) for slots in self._slots]
        self.arenas = [
            SlotArena(params, slot_bytes, capacity, device)
            for (params, slot_bytes), capacity in zip(shapes, capacities, strict=True)
        ]
        experts_per_layer = [layer.num_experts for layer in layers]
        self.states = StateTable(experts_per_layer)
        self.addresses = AddressTable(experts_per_layer, arena_of_layer, capacities)
        self._retry_at: dict[tuple[int, int], float] = {}
        self._ordered_from: list[int | None] = [None] * len(layers)

    def arena(self, layer: int) -> SlotArena:
        """The slots that a layer's experts lie in."""
        return self.arenas[self.addresses.arena_of_layer[layer]]

    def ordered_from(self, layer: int) -> int | None:
        """First slot of a layer whose experts are all resident, in order, side by side."""
        return self._ordered_from[layer]

    def admit(
        self, layer: int, experts: Sequence[int], keep: IntArray | None = None
    ) -> list[tuple[int, int]]:
        """Begin to load as many of `experts` as have room: (expert, slot), in order.

        Room is free slots, then the policy's choice of resident experts that nobody has pinned
        and `keep` does not name.
        """
        free = self._free[layer]
        if len(free) < len(experts):
            candidates = self.evictable(layer)
            if keep is not None:
                candidates = candidates[~np.isin(candidates, keep)]
            victims = self.policy.victims(layer, candidates, len(experts) - len(free))
            for victim in victims.tolist():
                self._evict(layer, victim)
            if self.quota_keeper is not None and keep is None and victims.size:
                others = candidates[~np.isin(candidates, victims)]
                self.quota_keeper.evicted(layer, victims, others)
        admitted = []
        for expert in experts[: len(free)]:
            self.states.start_loading(layer, expert)
            slot = self._take_slot(layer, expert)
            self.addresses.bind(layer, expert, slot)
            admitted.append((expert, slot))
        return admitted

    def room_for(self, layer: int, experts: IntArray) -> int:
        """Slots of a layer in which `experts` can be: all but those of other hot experts."""
        room = self.quotas[layer]
        if layer in self.hot:
            held = self.hot[layer][self.addresses.slot_of[layer][self.hot[layer]] >= 0]
            room -= int(np.count_nonzero(~np.isin(held, experts)))
        return room

    def has_slots_for_all(self, layer: int) -> bool:
        """Whether nobody has to leave this layer, ever: there is nothing to decide."""
        return self.quotas[layer] == self.layers[layer].num_experts

    def make_quota_keeper(self) -> QuotaKeeper:
        """Who proposes to move slots between these layers."""
        return QuotaKeeper(
            self.policy,
            self.addresses.arena_of_layer,
            self.floors,
            [layer.num_experts for layer in self.layers],
        )

    def num_free(self, layer: int) -> int:
        """Slots of a layer that hold nothing."""
        return len(self._free[layer])

    def evictable(self, layer: int) -> IntArray:
        """Experts of a layer whose slots may be reused now."""
        found = self.states.evictable(layer)
        if layer in self.hot:
            found = found[~np.isin(found, self.hot[layer])]
        return found

    def evict_if_idle(self, layer: int, expert: int) -> None:
        """Free the slot of an expert that is resident and not pinned; else do nothing."""
        if expert in self.evictable(layer):
            self._evict(layer, expert)

    def landed(self, layer: int, expert: int) -> None:
        """An expert's bytes are in its slot and were found good."""
        self.states.finish_loading(layer, expert)
        self._retry_at.pop((layer, expert), None)
        if self.states.is_whole(layer):
            slots = self.addresses.slot_of[layer][: self.layers[layer].num_experts]
            if (np.diff(slots) == 1).all():
                self._ordered_from[layer] = int(slots[0])

    def failed(self, layer: int, expert: int, needed: bool) -> None:
        """An expert's bytes could not be had: quarantined, its slot free again.

        Where nobody `needed` it yet, whoever does first tries again: a guess fails no request.
        """
        self.states.fail_loading(layer, expert)
        self._retry_at[layer, expert] = self._clock() + (QUARANTINE_S if needed else 0.0)
        self._give_back_slot(layer, expert)

    def called_off(self, layer: int, expert: int) -> None:
        """A load was dropped before it began."""
        self.states.cancel_loading(layer, expert)
        self._give_back_slot(layer, expert)

    def is_barred(self, layer: int, expert: int) -> bool:
        """QUARANTINED, and too early to try again."""
        return (
            self.states.state[layer, expert] == State.QUARANTINED
            and self._clock() < self._retry_at[layer, expert]
        )

    def move_quota(self, source: int, target: int, slots: int) -> None:
        """Hand `slots` slots of one layer to another of equal shape, emptied if need be.

        Raises BudgetError, before anything moves, where the source would fall below its top_k,
        the target would have more slots than experts, or shapes differ.
        """
        arena_of_layer = self.addresses.arena_of_layer
        if source == target or arena_of_layer[source] != arena_of_layer[target]:
            raise BudgetError(
                f"slots move between two layers of equal slot shape, not {source} to {target}"
            )
        floor = self.floors[source]
        ceiling = self.layers[target].num_experts
        if (
            slots < 1
            or self.quotas[source] - slots < floor
            or self.quotas[target] + slots > ceiling
        ):
            raise BudgetError(
                f"cannot move {slots} slots from layer {source} ({self.quotas[source]} slots, "
                f"needs {floor}) to layer {target} ({self.quotas[target]} slots, "
                f"can use {ceiling})"
            )
        wanted = slots - len(self._free[source])
        candidates = self.evictable(source)
        if candidates.size < wanted:
            raise ResidencyViolation(
                f"layer {source}: {wanted} slots have to be emptied, {candidates.size} can be; "
                "quotas move between steps, with no load under way"
            )
        for victim in self.policy.victims(source, candidates, wanted):
            self._evict(source, int(victim))
        for _ in range(slots):
            slot = heapq.heappop(self._free[source])
            self._slots[source].remove(slot)
            self._slots[target].append(slot)
            heapq.heappush(self._free[target], slot)
        self._slots[target].sort()
        self.quotas[source] -= slots
        self.quotas[target] += slots

    def check_invariants(self) -> None:
        """Raise ResidencyViolation unless tables, quotas and slots agree."""
        for number, layer in enumerate(self.layers):
            row = self.states.state[number]
            holders = np.flatnonzero((row == State.LOADING) | (row == State.RESIDENT))
            slots = self.addresses.lookup(number, holders)
            owned = self._slots[number]
            problems = {
                "pins are left": self.states.pins[number].any(),
                "a slot is held twice or not its layer's": sorted([*slots, *self._free[number]])
                != owned,
                "quota and slots differ": len(owned) != self.quotas[number],
                "quota out of bounds": not layer.top_k <= self.quotas[number] <= layer.num_experts,
                "resident experts are miscounted": self.states.resident_counts[number]
                != (row == State.RESIDENT).sum(),
                "an expert without a slot has an address": (
                    np.delete(self.addresses.slot_of[number], holders) >= 0
                ).any(),
            }
            for problem, found in problems.items():
                if found:
                    raise ResidencyViolation(f"layer {number}: {problem}")
        if sum(self.quotas) != sum(arena.capacity for arena in self.arenas):
            raise ResidencyViolation("quotas do not sum to the slots there are")

    def _evict(self, layer: int, expert: int) -> None:
        self.states.evict(layer, expert)
        self._give_back_slot(layer, expert)
        self.policy.evicted(layer, expert)
        self.evictions += 1

    def _take_slot(self, layer: int, expert: int) -> int:
        free = self._free[layer]
        if self.quotas[layer] == self.layers[layer].num_experts:
            # A slot for each: every expert goes to its own place, so that the full layer
            # lies in expert order.
            home = self._slots[layer][expert]
            if home in free:
                free.remove(home)
                heapq.heapify(free)
                return home
        return heapq.heappop(free)

    def _give_back_slot(self, layer: int, expert: int) -> None:
        heapq.heappush(self._free[layer], self.addresses.release(layer, expert))
        self._ordered_from[layer] = None


def _checked_hot_set(
    hot_set: Mapping[int, Sequence[int]], layers: Sequence[LayerSpec], quotas: Sequence[int]
) -> dict[int, IntArray]:
    checked = {}
    for at, experts in hot_set.items():
        if not 0 <= at < len(layers):
            raise BudgetError(f"hot_set: expected MoE layers 0..{len(layers) - 1}, found {at}")
        layer, distinct = layers[at], np.unique(np.asarray(experts, dtype=np.int64))
        if distinct.size and not 0 <= distinct[0] <= distinct[-1] < layer.num_experts:
            raise BudgetError(
                f"hot_set: layer {at} has experts 0..{layer.num_experts - 1}, "
                f"found {distinct[0]}..{distinct[-1]}"
            )
        if quotas[at] < layer.num_experts and distinct.size + layer.top_k > quotas[at]:
            raise BudgetError(
                f"hot_set: layer {at} has {quotas[at]} slots, of which {layer.top_k} must be left "
                f"to other experts; found {distinct.size} hot ones: name fewer or raise "
                "expert_memory"
            )
        checked[at] = distinct
    return checked
