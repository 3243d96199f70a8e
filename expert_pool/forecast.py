"""What a layer is about to be asked for: every predictor's guess, and how good each one is.

A forecast is made while an earlier layer computes and judged when its own layer has been asked.
By rank of a score it is counted how often the expert was asked for, be it here or missing: that
gives each predictor's recall, and turns the best one's ranks into probabilities. Nothing is read
for any of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from core.step import SequencePart
from expert_pool.popularity import Popularity
from expert_pool.predictors import (
    HALF_LIFE_TOKENS,
    PROMPT_FIRST_TOKENS,
    PreviousTokenPredictor,
    PromptPredictor,
    Scores,
    TransitionPredictor,
)
from expert_pool.tables import IntArray

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

SOURCES: Final = ("gate", "transitions", "previous", "prompt", "popularity")
"""In order of preference where they are equally good."""
ENOUGH_FORECASTS: Final = 32
"""Before that many were judged, a predictor's probabilities count as 0."""
_CLASS_STARTS: Final = (2, 8, 32)
"""Steps of 1, 2 to 7, 8 to 31 and more tokens are judged apart: a wide one wants everything. So are
forecasts of the first layers, which are made from the last layers of the step before."""
_HALVED_AT: Final = 2048.0
_ALL_SOURCES_EVERY: Final = 4
"""Steps between those in which all predictors are judged; in the others, the best one is."""
_SEQUENCES_REMEMBERED: Final = 256
_SEQUENCES_LOOKED_AT: Final = 8


@dataclass(slots=True)
class Forecast:
    """One layer's experts, likeliest first, as some predictors see them."""

    sources: tuple[int, ...]
    """Numbers of the predictors, the best one first."""
    orders: IntArray
    """[sources, experts]: every expert, best first."""
    missing: BoolArray
    """Experts that were not here when the forecast was made."""
    judged_as: int
    """Forecasts of this kind are judged together."""
    likely: FloatArray
    """[experts]: probability that an expert that is here is asked for, by the best predictor."""
    candidates: IntArray
    """The missing experts, best first."""
    chances: FloatArray
    """Probability of each candidate that it is asked for."""


class Forecaster:
    """All predictors of one pool. Layers are numbered as the pool does."""

    def __init__(self, num_layers: int, num_experts: int, has_gate: bool = False) -> None:
        """`has_gate`: scores of the later layer's own gate will be given."""
        self.distance = 1
        """A layer is forecast while the one so many layers before it computes."""
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._transitions = TransitionPredictor(num_layers, num_experts)
        self._previous = PreviousTokenPredictor(num_layers, num_experts)
        self._prompts = PromptPredictor(num_layers, num_experts)
        self._everyone = Popularity(num_layers, num_experts, HALF_LIFE_TOKENS)
        self._last: list[IntArray] = [np.zeros(0, np.int64)] * num_layers
        """What each layer was last asked for."""
        self._known = tuple(range(0 if has_gate else 1, len(SOURCES)))
        self._first_ids: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._buckets: IntArray | None = None
        """Of the step's prompts."""
        self._only_prompt = False
        self._rates: FloatArray | None = None
        """[layers, experts]: popularity by the labels of the step's sequences."""
        self._steps = 0
        classes = 2 * (len(_CLASS_STARTS) + 1)
        shape = (classes, len(SOURCES), num_experts)
        self._judged: FloatArray = np.zeros(shape[:2], np.float32)
        self._asked_missing: FloatArray = np.zeros(shape, np.float32)
        self._judged_missing: FloatArray = np.zeros(shape, np.float32)
        self._asked_here: FloatArray = np.zeros(shape, np.float32)
        self._judged_here: FloatArray = np.zeros(shape, np.float32)
        self._best = [self._known[0]] * classes

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        own = self._transitions.nbytes + self._prompts.nbytes + 4 * self._asked_here.nbytes
        return own + 2 * self._everyone.counts.nbytes

    def begin_step(
        self,
        parts: Iterable[SequencePart] = (),
        in_order: bool = False,
        rates: FloatArray | None = None,
    ) -> None:
        """The sequences that pass in this step; `rates` [layers, experts] is what their domains and
        sessions let expect, None where these are unknown: what everyone uses.

        `in_order`: they pass layer by layer. How their prompts begin is kept for later steps, and
        no prompt is learned from: nothing says that a layer is asked once for the whole of one.
        """
        self._steps += 1
        self._rates = rates
        first_ids: list[int] = []
        alone, count = False, 0
        for part in parts:
            count += 1
            if part.start == 0:
                self._first_ids[part.sequence_id] = part.token_ids[:PROMPT_FIRST_TOKENS]
                alone = len(part.token_ids) > 1
            if count <= _SEQUENCES_LOOKED_AT:
                first_ids += self._first_ids.get(part.sequence_id, ())
        while len(self._first_ids) > _SEQUENCES_REMEMBERED:
            self._first_ids.popitem(last=False)
        known = first_ids and not in_order
        self._buckets = self._prompts.buckets(tuple(dict.fromkeys(first_ids))) if known else None
        self._only_prompt = alone and count == 1

    def expected_of_prompt(self, token_ids: Sequence[int]) -> FloatArray | None:
        """Rates that a prompt's first ids let expect, [layers, experts]; None where all are new."""
        return self._prompts.predict_all(token_ids)

    def wants_gate(self, layer: int, tokens: int) -> bool:
        """Whether the scores of a layer's gate are of use in this step, of so many tokens."""
        best = self._best[self._class_of(layer, tokens)]
        return best == 0 or self._steps % _ALL_SOURCES_EVERY == 0

    def learn(self, layer: int, experts: IntArray, counts: IntArray, tokens: int) -> None:
        """`tokens` rows chose each of a layer's distinct `experts` `counts` times."""
        source = (layer - self.distance) % self._num_layers
        self._transitions.learn(source, self._last[source], experts, tokens)
        self._last[layer] = experts
        self._previous.learn_counts(layer, experts, counts, tokens)
        self._everyone.add(layer, experts, counts, tokens)
        if self._only_prompt and self._buckets is not None:
            rates = np.zeros(self._num_experts)
            rates[experts] = counts / tokens
            self._prompts.learn(self._buckets, layer, rates)

    def forecast(
        self, layer: int, tokens: int, missing: BoolArray, gate: FloatArray | None
    ) -> Forecast:
        """Of a layer `distance` after the one asked last; `missing` experts are not here.

        `gate`: scores by the layer's own gate, where the model allows it.
        """
        cls = self._class_of(layer, tokens)
        best = self._best[cls]
        if best == 0 and gate is None:
            best = self._known[-1]
        wanted: tuple[int, ...] = (best,)
        if self._steps % _ALL_SOURCES_EVERY == 0:
            wanted += tuple(source for source in self._known if source != best)
        rows, sources = [], []
        for source in wanted:
            scores = self._scores(source, layer, gate)
            if scores is not None:
                rows.append(scores)
                sources.append(source)
        if not rows:
            rows, sources = [self._popular(layer)], [len(SOURCES) - 1]
        negated = np.empty((len(rows), self._num_experts))
        for at, scores in enumerate(rows):
            np.negative(scores, out=negated[at])
        orders = negated.argsort(axis=1, kind="stable")
        first, order = sources[0], orders[0]
        gone = missing[order]
        # An expert in a place near the front is asked for more often if it is here, as others of
        # its place were asked for just before; so the two are counted apart.
        chances = _rates(self._asked_missing[cls, first], self._judged_missing[cls, first])
        likely: FloatArray = np.empty(self._num_experts, np.float32)
        likely[order] = _rates(self._asked_here[cls, first], self._judged_here[cls, first])
        return Forecast(
            sources=tuple(sources),
            orders=orders,
            missing=missing,
            judged_as=cls,
            likely=likely,
            candidates=order[gone],
            chances=chances[gone],
        )

    def judge(self, forecast: Forecast, experts: IntArray) -> None:
        """The layer was asked for `experts`."""
        used = np.zeros(self._num_experts, np.bool_)
        used[experts] = True
        orders, missing, cls = forecast.orders, forecast.missing, forecast.judged_as
        sources = list(forecast.sources)
        asked, gone = used[orders], missing[orders]
        self._asked_missing[cls, sources] += asked & gone
        self._judged_missing[cls, sources] += gone
        self._asked_here[cls, sources] += asked & ~gone
        self._judged_here[cls, sources] += ~gone
        self._judged[cls, sources] += 1.0
        if self._judged[cls, sources[0]] > _HALVED_AT:
            for table in self._tables():
                table[cls] *= 0.5
        if len(sources) > 1:
            self._best[cls] = self._choose(cls, max(experts.size, 1))

    def recall(self) -> dict[str, float]:
        """By predictor: share of the experts asked for that its first 2 x asked named, lately.

        Over the steps with one token where there were any, else over the next wider ones.
        """
        found: dict[str, float] = {}
        known = np.flatnonzero(self._judged.any(axis=1))
        if not known.size:
            return found
        for source, name in enumerate(SOURCES):
            cls, judged = known[0], float(self._judged[known[0], source])
            asked = self._asked_missing[cls, source] + self._asked_here[cls, source]
            total = float(asked.sum())
            if total:
                budget = 2 * max(1, round(total / judged))
                found[name] = float(asked[:budget].sum()) / total
        return found

    def set_distance(self, distance: int) -> None:
        """Forecast layers so far ahead from now on; what was learned of another is dropped."""
        if distance == self.distance:
            return
        self.distance = distance
        self._transitions.forget()
        for table in self._tables():
            table.fill(0.0)

    def _tables(self) -> tuple[FloatArray, ...]:
        return (
            self._judged,
            self._asked_missing,
            self._judged_missing,
            self._asked_here,
            self._judged_here,
        )

    def _class_of(self, layer: int, tokens: int) -> int:
        width = sum(tokens >= start for start in _CLASS_STARTS)
        return width if layer >= self.distance else width + len(_CLASS_STARTS) + 1

    def _choose(self, cls: int, number: int) -> int:
        """Who names the most of the missing experts that are asked for, in its first few."""
        seen = self._asked_missing[cls].sum(axis=1)
        named = self._asked_missing[cls, :, :number].sum(axis=1) / np.maximum(seen, 1.0)
        known = [source for source in self._known if seen[source] > 0]
        return max(known or self._known, key=lambda source: (float(named[source]), -source))

    def _scores(self, source: int, layer: int, gate: FloatArray | None) -> Scores | None:
        if source == 0:
            return None if gate is None else gate.astype(np.float64)
        if source == 1:
            before = (layer - self.distance) % self._num_layers
            return self._transitions.predict(before, self._last[before])
        if source == 2:
            return self._previous.predict(layer)
        if source == 3:
            return None if self._buckets is None else self._prompts.predict(self._buckets, layer)
        return self._popular(layer)

    def _popular(self, layer: int) -> Scores:
        if self._rates is not None:
            return self._rates[layer].astype(np.float64)
        return self._everyone.rates(layer)


def _rates(asked: FloatArray, judged: FloatArray) -> FloatArray:
    """By place: how often it was asked for; 0 where too little is known."""
    rates: FloatArray = np.divide(asked, np.maximum(judged, 1.0), dtype=np.float32)
    rates[judged < ENOUGH_FORECASTS] = 0.0
    return rates
