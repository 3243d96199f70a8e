"""The expert pool: a bounded number of slots that experts pass through as tokens need them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from core.errors import CheckpointError
from core.step import PoolStepStats, RoutingSummary, SequencePart
from expert_pool.checksums import ChecksumBook
from expert_pool.domain_popularity import FloatArray
from expert_pool.eviction_rules import EvictionRules
from expert_pool.expectations import Expectations
from expert_pool.file_reader import Reader
from expert_pool.host_tier import HostTier
from expert_pool.keeper import Keeper, move_slots
from expert_pool.kernels.choice import choose_kernels
from expert_pool.ordered_pass import OrderedPass
from expert_pool.policies import make_policy
from expert_pool.preload import begin_preloads
from expert_pool.read_ahead import ReadAhead
from expert_pool.residency import Residency
from expert_pool.settings import PoolSettings, expert_memory_bytes
from expert_pool.store import DEMAND, ExpertStore, Load
from expert_pool.tables import IntArray, ResidencyViolation, State
from expert_pool.tiers import open_host_tier, open_reader
from expert_pool.usage import Usage
from expert_pool.waves import LayerPass

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import CheckpointIndex


class ExpertPool:
    """Experts of one model on one device. One step thread calls it; its readers are its own."""

    def __init__(
        self,
        index: CheckpointIndex,
        settings: PoolSettings,
        device: str | torch.device = "cpu",
        reader: Reader | None = None,
        clock: Callable[[], float] = time.monotonic,
        host_tier: HostTier | None = None,
    ) -> None:
        """Reserves the slots and starts the reader threads.

        A `host_tier` is closed with the pool; without one, the settings say which there is.

        Raises BudgetError, naming need and have in bytes, where `settings.expert_memory` or the
        machine does not hold top_k experts a layer.
        """
        self.index = index
        self.settings = settings
        self.device = torch.device(device)
        layers = index.layers
        num_experts = max(layer.num_experts for layer in layers)
        all_bytes = sum(layer.num_experts * layer.slot_bytes for layer in layers)
        self.residency = Residency(
            layers,
            expert_memory_bytes(settings.expert_memory, all_bytes),
            EvictionRules(
                make_policy(settings.policy, len(layers), num_experts),
                len(layers),
                [layer.num_experts for layer in layers],
                settings.hysteresis,
            ),
            self.device,
            clock,
            settings.hot_set,
        )
        self._checksums = ChecksumBook(index) if settings.verify_checksums else None
        self.clock = clock
        self._store = ExpertStore(
            index,
            reader or open_reader(index, settings, self.device),
            settings.read_threads,
            self._checksums.get if self._checksums else None,
            host_tier or open_host_tier(index, settings, self.device),
        )
        self._loads: dict[tuple[int, int], Load] = {}
        self.loads = np.zeros((len(layers), num_experts), dtype=np.int64)
        """(token, expert) pairs computed so far, by layer and expert."""
        self.stats = PoolStepStats()
        """Of the step under way, or of what came in since the last one."""
        self.row_offset = 0
        """Row of the step's flattened batch that the next forward call begins with; set by
        runners that pass a step in several calls, put back to 0 by `begin_step`."""
        self.read_early: dict[int, list[int]] = {}
        """By layer: experts that the ordered pass of the layer before has had read."""
        self.in_ordered_pass = False
        """Whether an ordered pass has begun and is not over; it may last for several steps."""
        self._awaited: dict[tuple[int, int], int] = {}
        """Demand misses by (layer, expert) of which it is not known yet who serves them."""
        self.projection_values = [layer.projection_values() for layer in layers]
        self.observer: Callable[[int, torch.Tensor], None] | None = None
        """Told of each forward call: the layer, and what its router chose `[T, K]`."""
        self._bad_rows: set[int] = set()
        self._failed_rows: set[int] = set()
        self._read_until_s = 0.0
        self._step = 0
        self._asked_in_step = np.zeros(self.loads.shape, dtype=np.int32)
        self._asked_layer_in_step = [0] * len(layers)
        self._evictions_before = 0
        self.usage = Usage(index, clock) if settings.hot_start_s else None
        self._keeper = Keeper(self.residency, settings)
        self.read_ahead: ReadAhead | None = None
        """None where every expert has a slot, and where the settings do not want it."""
        whole = all(
            q == la.num_experts for q, la in zip(self.residency.quotas, layers, strict=True)
        )
        if settings.prefetch != "off" and len(layers) > 1 and not whole:
            self.read_ahead = ReadAhead(self, always=settings.prefetch == "on")
        self.expectations = Expectations(self)
        self.preload([(layer, e) for layer, experts in settings.hot_set.items() for e in experts])

    def attach(self, model: torch.nn.Module) -> None:
        """Mark the model's experts modules, so that `experts_forward` finds the pool."""
        for layer in self.index.layers:
            module = model.get_submodule(layer.module_name)
            names = {param.name for param in layer.params}
            expected = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
            if module.has_bias:
                expected |= {f"{name}_bias" for name in expected}
            if not expected <= names:
                raise CheckpointError(
                    f"{layer.module_name}: expected parameters {sorted(expected)}, "
                    f"found {sorted(names)}"
                )
            object.__setattr__(module, "_coterie", (self, layer.ordinal))
        choose_kernels(self, model)
        if self.read_ahead is not None:
            self.read_ahead.attach(model)

    def begin_step(self, parts: Iterable[SequencePart] = (), in_order: bool = False) -> None:
        """Start counting a step; preloads that came in since the last one count with it.

        `parts`, if known, are what passes in it: what they use can be foreseen a little.
        `in_order`: they pass layer by layer, where nothing is to be foreseen.
        """
        self._take_in(self._store.finished(wait=False))
        self.row_offset = 0
        self._bad_rows.clear()
        self._failed_rows.clear()
        self._step += 1
        parts = tuple(parts)
        rates = self.expectations.begin_step(parts)
        if self.read_ahead is not None:
            self.read_ahead.begin_step(parts, in_order, rates)

    def end_step(self) -> PoolStepStats:
        """What the step cost. Raises ResidencyViolation if an expert is still pinned."""
        self._take_in(self._store.finished(wait=False))
        if np.count_nonzero(self.residency.states.pins):
            raise ResidencyViolation("experts are still pinned at the end of a step")
        if self._awaited and not self.in_ordered_pass:
            self.stats.disk_misses += sum(self._awaited.values())  # barred, or the step broke off
            self._awaited.clear()
        stats, self.stats = self.stats, PoolStepStats()
        stats.evictions = self.residency.evictions - self._evictions_before
        self._evictions_before = self.residency.evictions
        stats.resident = sum(self.residency.states.resident_counts)
        for source, target in self._keeper.end_step(stats):
            self.move_quota(source, target)
        stats.bad_rows = tuple(sorted(self._bad_rows))
        stats.failed_rows = tuple(sorted(self._failed_rows))
        if self.read_ahead is not None:
            stats.prefetch = self.read_ahead.end_step(stats.stall_s)
        if self._checksums is not None:
            self._checksums.save_if_due(self.clock())
        self.expectations.end_step(stats)
        return stats

    def demand(
        self,
        layer: int,
        counts: IntArray,
        tokens: int,
        in_order: bool = False,
        weights: Callable[[], npt.NDArray[np.floating]] | None = None,
        rows: Callable[[], IntArray] | None = None,
    ) -> LayerPass | OrderedPass:
        """`tokens` rows are at a layer and chose each of its experts `counts[expert]` times.

        `in_order`: many rows, whose experts are to come one after another, each read once.
        `weights()`: what each expert got of the rows' router weights.
        `rows()`: of the present forward call, by expert: first those that chose expert 0.
        """
        if self._loads:
            self._take_in(self._store.finished(wait=False))
        active = counts.nonzero()[0]
        used = counts[active]
        new: IntArray | None = None  # whom the step has not asked for before; None: everybody
        if self._asked_layer_in_step[layer] == self._step:
            new = np.flatnonzero(self._asked_in_step[layer][active] != self._step)
        self._asked_layer_in_step[layer] = self._step
        self._asked_in_step[layer][active] = self._step
        self.loads[layer][active] += used
        stats, number = self.stats, active.size if new is None else new.size
        stats.routed_pairs += int(np.add.reduce(used))
        stats.waves += max(1, -(-active.size // self.residency.quotas[layer]))
        has_slots_for_all = self.residency.has_slots_for_all(layer)
        if has_slots_for_all:
            self._keeper.demanded_of_whole(layer, active)
        if self.residency.states.is_whole(layer):
            stats.demand_hits += number
        else:
            self.expectations.demanded(layer, active)
            resident = self.residency.states.is_resident(layer, active)
            hits = int(np.count_nonzero(resident if new is None else resident[new]))
            stats.demand_hits += hits
            if hits < number:
                stats.demand_misses += number - hits
                missing = active[~resident] if new is None else active[new[~resident[new]]]
                for expert in missing.tolist():
                    self._awaited[layer, expert] = self._awaited.get((layer, expert), 0) + 1
            if not has_slots_for_all:
                self._keeper.demanded(layer, active, used, tokens, active[~resident], weights)
        if rows is not None and self.expectations.gathers:
            self.expectations.note(layer, counts, rows() + self.row_offset)
        if self.read_ahead is not None:
            self.call_off(layer, self.read_ahead.demanded(layer, active, used, tokens))
        return OrderedPass(self, layer, active) if in_order else LayerPass(self, layer, active)

    def report_bad_rows(self, rows: Sequence[int]) -> None:
        """Rows of the present forward call whose routing is NaN, infinite or out of range."""
        self._bad_rows.update(self.row_offset + row for row in rows)

    def report_failed_rows(self, rows: Sequence[int]) -> None:
        """Rows of the present forward call that needed an expert which could not be read."""
        self._failed_rows.update(self.row_offset + row for row in rows)

    def hint(
        self, domain: str, session: str = "", tenant: str = "", first_ids: Sequence[int] = ()
    ) -> None:
        """A request is coming: what it will likely need may be read. Between steps.

        `first_ids` begin its prompt; they count where nothing is known of its domain and session.
        Nothing happens where they are new too, or where hints do not pay.
        """
        self.expectations.hint(domain, session, tenant, first_ids)

    def signature(
        self, domain: str, session: str = "", first_ids: Sequence[int] = (), tenant: str = ""
    ) -> FloatArray | None:
        """How likely a token of such a request chooses each expert, [layers, experts].

        None before anything is known. Not to be written; it costs no reckoning most of the time.
        """
        return self.expectations.signature(domain, session, tenant, first_ids)

    def routing_summary(self) -> RoutingSummary:
        """Where experts lie and what a miss costs, for whoever chooses a replica."""
        return self.expectations.summary()

    def move_quota(self, from_ordinal: int, to_ordinal: int, slots: int = 1) -> None:
        """Hand slots of one layer to another of equal shape, between steps.

        Waits for reads of these two layers that have begun or are demanded. Their preloads are
        called off, and queued again where there is room; prefetched ones are not.
        Raises BudgetError where a layer would have fewer slots than top_k or more than experts.
        """
        move_slots(self, from_ordinal, to_ordinal, slots)

    def preload(self, experts: Sequence[tuple[int, int]]) -> None:
        """Begin to read (layer, expert) pairs while nothing else is to be read, first ones first.

        Takes free slots, then evicts experts that are not among them. What finds no room, is
        there already, or is quarantined, is left out.
        """
        begin_preloads(self, experts)

    def evict(self, experts: Sequence[tuple[int, int]]) -> None:
        """Let go of (layer, expert) pairs; those pinned, on their way or not here stay as are."""
        for layer, expert in experts:
            self.residency.evict_if_idle(layer, expert)

    def settle(self) -> None:
        """Wait until every load under way has come in."""
        while self._loads:
            self.collect(wait=True)

    def resident_counts(self) -> IntArray:
        """Resident experts of each layer."""
        return np.array(self.residency.states.resident_counts)

    def check_invariants(self) -> None:
        """Raise ResidencyViolation unless all tables agree. Between steps."""
        self.residency.check_invariants()
        loading = np.argwhere(self.residency.states.state == State.LOADING)
        if sorted(self._loads) != [tuple(pair) for pair in loading.tolist()]:
            raise ResidencyViolation("experts are LOADING without a load, or the other way round")
        if len(self._loads) != self._store.in_flight:
            raise ResidencyViolation("loads under way are miscounted")
        ahead = self.read_ahead
        if ahead is not None and not ahead.prefetcher.check(self.residency.states.state):
            raise ResidencyViolation("prefetched experts under way are miscounted")

    def close(self) -> None:
        """Stop the readers, keep what was learned. The pool is of no use afterwards."""
        self._keeper.close()
        self._store.close()
        if self._checksums is not None:
            self._checksums.save_if_due()
        self.expectations.save()

    def submit(self, layer: int, expert: int, slot: int, priority: int) -> None:
        """Have the store fill a slot that was admitted."""
        if self.residency.states.state[layer, expert] != State.LOADING:
            raise ResidencyViolation(
                f"layer {layer} expert {expert}: its slot may be written only while LOADING"
            )
        fence = None
        if self.device.type == "cuda":
            fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
            fence.record(torch.cuda.current_stream(self.device))
        load = Load(layer, expert, self.residency.arena(layer).slot(slot), priority, fence)
        self._loads[layer, expert] = load
        self._store.submit(load)

    def hurry(self, layer: int, expert: int) -> None:
        """An expert that is being preloaded is needed now."""
        self._store.hurry(self._loads[layer, expert])

    def call_off_preloads(self, layer: int) -> bool:
        """Free the slots of a layer's preloads that have not begun; True if there were any."""
        return self._call_off(
            [
                load
                for load in self._loads.values()
                if load.layer == layer and load.priority != DEMAND
            ]
        )

    def collect(self, wait: bool) -> list[Load]:
        """Take in the loads that are done; with `wait`, at least one if any is under way."""
        if not self._loads:
            return []
        return self._take_in(self._store.finished(wait))

    def call_off(self, layer: int, experts: Sequence[int]) -> None:
        """Drop the reads of experts of a layer that have not begun; others stay as they are."""
        loads = [self._loads.get((layer, expert)) for expert in experts]
        self._call_off([load for load in loads if load is not None and load.priority != DEMAND])

    @property
    def under_way(self) -> Collection[Load]:
        """Experts that are being read or will be."""
        return self._loads.values()

    def _call_off(self, loads: list[Load]) -> bool:
        called_off = [load for load in loads if self._store.call_off(load)]
        for load in called_off:
            del self._loads[load.layer, load.expert]
            self.residency.called_off(load.layer, load.expert)
            self.expectations.preloader.called_off(load.layer, load.expert)
            if self.read_ahead is not None:
                self.read_ahead.prefetcher.called_off(load.layer, load.expert)
        return bool(called_off)

    def _take_in(self, loads: list[Load]) -> list[Load]:
        for load in loads:
            # Loads end about in the order in which they are taken in, so this is their union.
            self.stats.read_s += max(0.0, load.ended_s - max(load.began_s, self._read_until_s))
            self._read_until_s = max(self._read_until_s, load.ended_s)
            del self._loads[load.layer, load.expert]
            self.stats.rereads += max(0, load.attempts - 1)
            self.stats.records_read += load.full_reads
            self.stats.bytes_read += load.full_reads * load.record_bytes
            self.stats.host_records += load.from_host
            self.stats.host_bytes += load.from_host * load.record_bytes
            if self._awaited and (misses := self._awaited.pop((load.layer, load.expert), 0)):
                if load.from_host and load.error is None:
                    self.stats.host_misses += misses
                else:
                    self.stats.disk_misses += misses
            if self.read_ahead is not None:
                self.read_ahead.came(load)
            if load.error is not None:
                self.residency.failed(load.layer, load.expert, needed=load.priority == DEMAND)
                continue
            self.residency.landed(load.layer, load.expert)
            if self._checksums is not None and load.digest is not None:
                self._checksums.learn_new(load.layer, load.expert, load.digest, self.clock())
        return loads
