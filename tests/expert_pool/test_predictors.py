import numpy as np
import pytest

from expert_pool.popularity import Popularity
from expert_pool.predictors import (
    PreviousTokenPredictor,
    PromptPredictor,
    TransitionPredictor,
)
from tests.synthetic_trace import synthetic_trace


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


class RecallMeter:
    """Share of the experts asked for that were among the `budget` highest scores."""

    def __init__(self, budget):
        self.budget, self.demanded, self.found = budget, 0, 0

    def add(self, scores, experts):
        self.demanded += experts.size
        self.found += np.isin(experts, np.argsort(-scores, kind="stable")[: self.budget]).sum()


def test_transitions_follow_what_was_chosen_together():
    transitions = TransitionPredictor(3, 4)
    for _ in range(20):
        transitions.learn(0, ids(0), ids(3))
        transitions.learn(0, ids(1), ids(2))
    assert transitions.predict(0, ids(0)).argmax() == 3
    assert transitions.predict(0, ids(1)).argmax() == 2
    assert transitions.predict(1, ids(0)).tolist() == [0, 0, 0, 0]
    # An expert without a past gets the next layer's popularity.
    transitions.learn(0, ids(1), ids(2))
    assert transitions.predict(0, ids(2)).argmax() == 2


def test_transitions_forget():
    transitions = TransitionPredictor(2, 3)
    for _ in range(6000):
        transitions.learn(0, ids(0), ids(1))
    for _ in range(9000):
        transitions.learn(0, ids(0), ids(2))
    assert transitions.predict(0, ids(0)).argmax() == 2


def test_previous_token_prefers_the_last():
    previous = PreviousTokenPredictor(1, 4)
    previous.learn(0, ids(0, 1))
    previous.learn(0, ids(1, 2))
    assert np.argsort(-previous.predict(0), kind="stable").tolist() == [1, 2, 0, 3]


def test_a_prompts_ids_may_be_any_numbers():
    prompts = PromptPredictor(2, 3)
    odd = [2**63, 2**64 - 1, -5, -(2**70)]
    assert prompts.predict_all(odd) is None
    for layer in range(2):
        prompts.learn(prompts.buckets(odd), layer, np.array([1.0, 0.0, 0.0]))
    assert prompts.predict_all(odd).argmax(axis=1).tolist() == [0, 0]


def test_prompt_ids_recall_their_experts():
    prompts = PromptPredictor(2, 3)
    assert prompts.predict(prompts.buckets([5, 6]), 0) is None
    prompts.learn(prompts.buckets([1, 5]), 0, np.array([1.0, 0.0, 0.0]))
    for _ in range(8):
        prompts.learn(prompts.buckets([1, 6]), 0, np.array([0.0, 1.0, 0.0]))
    # Token 1 starts every prompt and says little; 5 is rare and says much.
    found = prompts.predict(prompts.buckets([1, 5]), 0)
    assert found is not None
    assert found.argmax() == 0
    found = prompts.predict(prompts.buckets([1, 6]), 0)
    assert found is not None
    assert found.argmax() == 1
    assert found.sum() == pytest.approx(1.0, abs=1e-3)
    assert prompts.predict(prompts.buckets([1, 5]), 1) is None


def test_all_layers_are_predicted_at_once_as_one_by_one():
    prompts = PromptPredictor(3, 5)
    draw = np.random.default_rng(0)
    assert prompts.predict_all([5, 6]) is None
    for first in ([1, 5], [1, 6], [1, 7, 8]):
        buckets = prompts.buckets(first)
        for layer in range(3):
            prompts.learn(buckets, layer, draw.random(5))
    found = prompts.predict_all([1, 5, 6, 900])
    for layer in range(3):
        one = prompts.predict(prompts.buckets([1, 5, 6, 900]), layer)
        assert found[layer] == pytest.approx(one, abs=1e-5)
    prompts.learn(prompts.buckets([77]), 0, draw.random(5))
    assert prompts.predict_all([77]) is None, "its prompt broke off in the first layer"


def test_prompts_without_end_stay_within_their_number_format():
    prompts = PromptPredictor(1, 3)
    for _ in range(5000):
        prompts.learn(prompts.buckets([1]), 0, np.array([1.0, 0.5, 0.0]))
    assert prompts.predict(prompts.buckets([1]), 0) == pytest.approx([1.0, 0.5, 0.0], abs=1e-2)


def test_transitions_share_rows_where_experts_are_many():
    transitions = TransitionPredictor(1, 256)
    assert transitions.nbytes / 256 < 64
    for _ in range(300):
        transitions.learn(0, ids(3, 51, 200), ids(7, 255))
    assert set(np.argsort(-transitions.predict(0, ids(200)))[:2].tolist()) == {7, 255}
    transitions.forget()
    assert not transitions.predict(0, ids(200)).any()


def test_recall_on_a_trace_is_ordered_as_on_real_ones():
    # Transitions over the previous token, that over popularity, all over chance.
    trace = synthetic_trace(seed=3)
    steps, layers, _ = trace.demands.shape
    transitions = TransitionPredictor(layers, trace.num_experts)
    previous = PreviousTokenPredictor(layers, trace.num_experts)
    everyone = Popularity(layers, trace.num_experts, half_life_tokens=4096)
    meters = {name: RecallMeter(8) for name in ("transitions", "previous", "popularity")}
    for step in range(steps):
        for layer in range(1, layers):
            before, demand = trace.demands[step, layer - 1], trace.demands[step, layer]
            if step > 100:
                meters["transitions"].add(transitions.predict(layer - 1, before), demand)
                meters["previous"].add(previous.predict(layer), demand)
                meters["popularity"].add(everyone.rates(layer), demand)
            transitions.learn(layer - 1, before, demand)
            previous.learn(layer, demand)
            everyone.add(layer, demand, np.ones_like(demand), 1)
    recall = {name: meter.found / meter.demanded for name, meter in meters.items()}
    assert recall["transitions"] > recall["previous"] > recall["popularity"] > 8 / 64
