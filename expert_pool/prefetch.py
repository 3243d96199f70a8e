"""Prefetch: reads that begin before a layer asks, chosen so that they are worth their bytes.

While one layer computes, the likeliest missing experts of a later one are read behind whatever is
demanded. Plain arrays and numbers, the clock passed in: the pool asks and does the reading.

- How far ahead: as many layers as a read takes, by measured times.
- How many: what can come in time, at most one layer's worth a layer and two in all; and wasted
  bytes are paid from an allowance of ALLOWANCE bytes for each byte that was of use, so they stay
  below that share whatever the forecasts are worth.
- Whom for: an expert makes room for another only if it is worth less, by the policy's own estimate
  and the forecast together. Who is pinned or under way never does.
- Whether at all: `payoff.py` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from core.step import PrefetchStats, SequencePart
from expert_pool.affinity_policy import DISCOUNT
from expert_pool.forecast import BoolArray, FloatArray, Forecast, Forecaster
from expert_pool.payoff import Payoff, ReadTimes
from expert_pool.tables import IntArray, State

ALLOWANCE: Final = 0.12
"""Bytes that may be wasted for each byte read of use."""
MOST_ALLOWANCE_RECORDS: Final = 64
MAX_DISTANCE: Final = 4
"""Layers ahead at most: forecasts get worse with each."""
FEW_TOKENS: Final = 32
"""Steps with fewer tell how long a layer takes; prompt parts take longer and need no prefetch."""
_SETTLED_STEPS: Final = 16
"""Steps in a row that must agree before the distance changes."""
_FORECAST_EVERY: Final = 16
"""Steps between forecasts while prefetch stands down: they keep the recall known."""
_LEARN_EVERY: Final = 4
"""Steps between those that the predictors learn from meanwhile."""
_EMA: Final = 0.05
_SAFETY: Final = 0.05
_CHANCE_WITHOUT_ALLOWANCE: Final = 0.6


class Choice(NamedTuple):
    """An expert to be read, and who makes room for it; None where a slot is free."""

    expert: int
    victim: int | None


class Prefetcher:
    """Decides what the pool reads ahead, and keeps count of what came of it."""

    def __init__(
        self,
        num_experts: Sequence[int],
        top_k: Sequence[int],
        record_bytes: Sequence[int],
        clock: Callable[[], float],
        always: bool = False,
        has_gate: bool = False,
    ) -> None:
        """By layer: experts, experts a token, bytes of one expert. `always`: never stand down."""
        layers = len(num_experts)
        self.forecaster = Forecaster(layers, max(num_experts), has_gate)
        self.payoff = Payoff(always)
        self.read_times = ReadTimes()
        self.stats = PrefetchStats()
        self._clock = clock
        self._num_experts = tuple(num_experts)
        self._record_bytes = tuple(record_bytes)
        self._widths = [min(k, e) for k, e in zip(top_k, num_experts, strict=True)]
        """Experts that each layer was last asked for."""
        self._pending: dict[int, Forecast] = {}
        """By layer: forecasts that wait for their layer to be asked."""
        self._open: list[set[int]] = [set() for _ in num_experts]
        """By layer: prefetched, and not yet asked for or known to be gone."""
        self._under_way: list[set[int]] = [set() for _ in num_experts]
        """By layer: those of them that have not come yet."""
        self._num_under_way = 0
        self._displaced: list[set[int]] = [set() for _ in num_experts]
        """By layer: who made room for a prefetched expert since the layer was last asked."""
        self._allowance = 0.0
        self._layer_s: float | None = None
        self._stall_share = 1.0
        """Share of the time in which a read is awaited."""
        self._unsettled = 0
        self._steps = 0
        self._step_began = 0.0
        self._last_layer: int | None = None
        self._asked_at = 0.0
        self._stalled_s = 0.0
        self._tokens = 0
        self._useful: tuple[int, int, int] = (0, 0, 0)
        """Of the pass under way: (prefetched, missing, all) experts."""

    @property
    def width(self) -> int:
        """Experts of the widest layer."""
        return max(self._num_experts)

    @property
    def num_under_way(self) -> int:
        """Prefetched experts that have not come yet."""
        return self._num_under_way

    @property
    def distance(self) -> int:
        """Layers between the one that computes and the one that is read for."""
        return self.forecaster.distance

    def begin_step(
        self,
        parts: Iterable[SequencePart] = (),
        in_order: bool = False,
        rates: FloatArray | None = None,
    ) -> None:
        """As `Forecaster.begin_step`."""
        self._steps += 1
        self._last_layer = None
        self._step_began = self._clock()
        self.forecaster.begin_step(parts, in_order, rates)
        self._adjust_distance()

    def end_step(self, stall_s: float) -> PrefetchStats:
        """What came of it in the step, in which reads were awaited for `stall_s` seconds."""
        step_s = self._clock() - self._step_began
        if step_s > 0 and self._last_layer is not None:
            self._stall_share += _EMA * (min(stall_s / step_s, 1.0) - self._stall_share)
            self.payoff.window.busy_s += step_s
        stats, self.stats = self.stats, PrefetchStats()
        stats.state, stats.distance_layers = self.payoff.state, self.distance
        stats.under_way = self._num_under_way
        stats.net_gain = self.payoff.last_gain
        stats.recall = self.forecaster.recall() if self._steps % _FORECAST_EVERY == 0 else {}
        return stats

    def demanded(
        self,
        layer: int,
        experts: IntArray,
        counts: IntArray,
        tokens: int,
        states: npt.NDArray[np.int8],
    ) -> list[int]:
        """A layer is asked for `experts` now. Returns who was to be read for it in vain.

        `states` is the layer's row of states as they are now.
        """
        now = self._clock()
        again = layer == self._last_layer
        if self._last_layer is not None and not again and tokens < FEW_TOKENS:
            self._note_layer_time(now - self._asked_at - self._stalled_s)
        self._last_layer, self._asked_at, self._stalled_s = layer, now, 0.0
        self._tokens = tokens
        self._drop_the_gone(layer, states)
        here = states[experts] == State.RESIDENT
        missing = experts.size - int(np.count_nonzero(here))
        useful, late, in_vain = 0, 0, []
        if self._open[layer]:
            asked = set(experts.tolist())
            for expert in self._open[layer] & asked:
                self._end_well(layer, expert)
                # One that is still on its way is missing too, and counts once.
                useful += expert not in self._under_way[layer]
            late = len(self._under_way[layer] & asked)
            in_vain = sorted(self._under_way[layer] - asked)
        if self._displaced[layer]:
            regretted = len(self._displaced[layer].intersection(experts[~here].tolist()))
            self.stats.regretted += regretted
            self._cost(layer, regretted, 1.0)
            self._allowance -= regretted * self._record_bytes[layer]
            self._displaced[layer].clear()
        self._useful = (useful + late, missing - late, experts.size)
        if not again:
            self._widths[layer] = experts.size
            forecast = self._pending.pop(layer, None)
            if forecast is not None:
                self.forecaster.judge(forecast, experts)
            if self.payoff.state != "off" or self._steps % _LEARN_EVERY == 0:
                self.forecaster.learn(layer, experts, counts, tokens)
        return in_vain

    def target(self, layer: int) -> int | None:
        """The layer to forecast while `layer` computes; None where there is nothing to do."""
        if self.payoff.state == "off" and self._steps % _FORECAST_EVERY:
            return None
        target = (layer + self.distance) % len(self._num_experts)
        return None if target in self._pending else target

    def choose(
        self,
        layer: int,
        states: npt.NDArray[np.int8],
        num_free: int,
        leavers: Callable[[int], IntArray],
        worth: Callable[[], npt.NDArray[np.floating]],
        gate: FloatArray | None = None,
    ) -> list[Choice]:
        """Whom to begin to read for `layer`, the likeliest first, and in whose place.

        `states` is the layer's row, `num_free` its free slots; `leavers(n)` names up to n experts
        that may leave, first one first; `worth()` is the policy's estimate by expert.
        """
        began = self._clock()
        number = self._num_experts[layer]
        missing: BoolArray = np.zeros(states.size, np.bool_)
        missing[:number] = states[:number] != State.RESIDENT
        forecast = self.forecaster.forecast(layer, self._tokens, missing, gate)
        self._pending[layer] = forecast
        chosen: list[Choice] = []
        room = 0 if self.payoff.state == "off" else self._room(layer)
        likely = forecast.chances > self._least_chance()
        if room > 0 and likely.any():
            free_to_read = likely & (states[forecast.candidates] == State.UNLOADED)
            places = np.flatnonzero(free_to_read)[:room]
            chosen = self._place(forecast, places, num_free, leavers, worth)
        spent_s = self._clock() - began
        self.stats.decide_s += spent_s
        self._harmed(spent_s)
        return chosen

    def began(self, layer: int, choice: Choice) -> None:
        """A chosen expert is on its way."""
        self._open[layer].add(choice.expert)
        self._under_way[layer].add(choice.expert)
        self._num_under_way += 1
        self._allowance -= self._record_bytes[layer]
        self.stats.begun += 1
        if choice.victim is not None:
            self._displaced[layer].add(choice.victim)

    def came(self, layer: int, expert: int, read_bytes: int) -> None:
        """A read of `read_bytes` is over, whether prefetched or demanded."""
        if expert in self._under_way[layer]:
            self._arrive(layer, expert)
        else:
            self._read_of_use(read_bytes)

    def failed(self, layer: int, expert: int) -> None:
        """An expert could not be read."""
        if expert in self._under_way[layer]:
            self._arrive(layer, expert)
            self._open[layer].discard(expert)

    def called_off(self, layer: int, expert: int) -> None:
        """A read was dropped before it began: nothing was wasted."""
        if expert in self._under_way[layer]:
            self._arrive(layer, expert)
            self._open[layer].discard(expert)
            self._allowance += self._record_bytes[layer]
            self.stats.called_off += 1

    def pass_ended(self, compute_s: float, stall_s: float, wait_s: float | None) -> None:
        """The pass that `demanded` began is over, after `stall_s` of waiting for reads.

        `wait_s`: from the first of its demanded reads to the end of the last one; None where there
        were none, or others were under way.
        """
        useful, missing, asked = self._useful
        self._useful = (0, 0, 0)
        self._stalled_s += stall_s
        if wait_s is not None and missing and not useful:
            self.read_times.add(missing, wait_s)
        if useful:
            hidden_s = max(0.0, self._stall_without(useful + missing, asked, compute_s) - stall_s)
            self.stats.hidden_s += hidden_s
            self.payoff.window.hidden_s += hidden_s
        if asked:
            self.payoff.pass_ended()

    def awaited(self, layer: int) -> set[int]:
        """Prefetched experts that have not been asked for yet."""
        return self._open[layer]

    def check(self, states: npt.NDArray[np.int8]) -> bool:
        """Whether the books agree with the states of all layers."""
        under_way = [(la, e) for la, experts in enumerate(self._under_way) for e in experts]
        return len(under_way) == self._num_under_way and all(
            states[layer, expert] == State.LOADING for layer, expert in under_way
        )

    def _stall_without(self, reads: int, asked: int, compute_s: float) -> float:
        """How long a pass over `asked` experts would have waited, had it to read `reads` of them.

        Those that are here are computed first, then each as it comes; so the wait is decided by
        the first or by the last that comes.
        """
        each_s = compute_s / asked
        first_s = self.read_times.seconds(1) - (asked - reads) * each_s
        last_s = self.read_times.seconds(reads) - (asked - 1) * each_s
        return max(first_s, last_s, 0.0)

    def _harmed(self, seconds: float) -> None:
        self.stats.harm_s += seconds
        self.payoff.window.harm_s += seconds

    def _room(self, layer: int) -> int:
        """Reads that may begin for a layer."""
        width = self._widths[layer]
        affordable = int(self._allowance // self._record_bytes[layer])
        in_all = 2 * width - self._num_under_way
        in_time = 1
        pace_s = self.read_times.pace_s
        if self._layer_s is not None and pace_s > 0:
            # What comes late still comes sooner; so one too many is better than one too few.
            in_time = math.ceil(self.distance * self._layer_s / pace_s)
        return min(affordable, in_all, min(width, in_time) - len(self._under_way[layer]))

    def _least_chance(self) -> float:
        """A read in vain costs its time where others wait, and is for the best where few can be."""
        waits = self._stall_share / (1.0 + self._stall_share) + _SAFETY
        left = self._allowance / (MOST_ALLOWANCE_RECORDS * max(self._record_bytes))
        return max(waits, _CHANCE_WITHOUT_ALLOWANCE * (1.0 - left))

    def _place(
        self,
        forecast: Forecast,
        places: IntArray,
        num_free: int,
        leavers: Callable[[int], IntArray],
        worth: Callable[[], npt.NDArray[np.floating]],
    ) -> list[Choice]:
        experts = forecast.candidates[places].tolist()
        chosen = [Choice(expert, None) for expert in experts[:num_free]]
        experts, places = experts[num_free:], places[num_free:]
        if not experts:
            return chosen
        victims = leavers(len(experts))
        later = DISCOUNT * worth()
        chances = forecast.chances[places]
        gains = chances + (1.0 - chances) * later[experts]
        likely = forecast.likely[victims]
        losses = likely + (1.0 - likely) * later[victims]
        for expert, gain, victim, loss in zip(
            experts, gains.tolist(), victims.tolist(), losses.tolist(), strict=False
        ):
            if gain <= loss:
                break
            chosen.append(Choice(expert, victim))
        return chosen

    def _drop_the_gone(self, layer: int, states: npt.NDArray[np.int8]) -> None:
        """Prefetched experts that left again before anybody asked were read in vain."""
        for expert in [e for e in self._open[layer] if states[e] == State.UNLOADED]:
            self._open[layer].remove(expert)
            self.stats.wasted += 1
            self.stats.wasted_bytes += self._record_bytes[layer]
            self._cost(layer, 1, self._stall_share)

    def _cost(self, layer: int, reads: int, waits: float) -> None:
        """So many reads were made for nothing; `waits` is the part of their time that is felt."""
        self.payoff.window.wasted_bytes += reads * self._record_bytes[layer]
        self._harmed(reads * waits * self.read_times.pace_s)

    def _end_well(self, layer: int, expert: int) -> None:
        self._open[layer].remove(expert)
        self._allowance += self._record_bytes[layer]
        self.stats.used += 1
        self.stats.used_bytes += self._record_bytes[layer]
        self._read_of_use(self._record_bytes[layer])

    def _read_of_use(self, nbytes: int) -> None:
        self.payoff.window.other_bytes += nbytes
        most = MOST_ALLOWANCE_RECORDS * max(self._record_bytes)
        self._allowance = min(self._allowance + ALLOWANCE * nbytes, most)

    def _arrive(self, layer: int, expert: int) -> None:
        self._under_way[layer].remove(expert)
        self._num_under_way -= 1

    def _note_layer_time(self, seconds: float) -> None:
        if self._layer_s is None:
            self._layer_s = max(seconds, 0.0)
        else:
            self._layer_s += _EMA * (max(seconds, 0.0) - self._layer_s)

    def _adjust_distance(self) -> None:
        if not self._layer_s or not self.read_times.known:
            return
        read_s, distance = self.read_times.seconds(1), self.distance
        most = min(MAX_DISTANCE, len(self._num_experts) - 1)
        wanted = min(max(math.ceil(read_s / self._layer_s), 1), most)
        # A quarter beyond the border, lest it goes to and fro.
        farther = wanted > distance and read_s > 1.25 * distance * self._layer_s
        nearer = wanted < distance and read_s < 0.75 * (distance - 1) * self._layer_s
        self._unsettled = self._unsettled + 1 if farther or nearer else 0
        if self._unsettled >= _SETTLED_STEPS:
            self._unsettled = 0
            self._pending.clear()
            self.forecaster.set_distance(wanted)
