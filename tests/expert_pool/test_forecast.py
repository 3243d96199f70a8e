"""Forecasts: every predictor is judged, the best one is believed, in place of chance."""

import numpy as np
import pytest

from core.step import SequencePart
from expert_pool.forecast import ENOUGH_FORECASTS, Forecaster

EXPERTS, LAYERS = 12, 4


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def part(sequence, start, tokens):
    return SequencePart(sequence_id=sequence, start=start, token_ids=tuple(tokens), block_ids=(0,),
                        is_decode=len(tokens) == 1, wants_logits=True)  # fmt: skip


def run(known, steps, ask, gate=None, missing=None, parts=None):
    """`ask(step, layer)` are the experts; forecasts are made and judged as the pool does."""
    gone = np.ones(EXPERTS, np.bool_) if missing is None else missing
    forecast = None
    for step in range(steps):
        known.begin_step(parts(step) if parts else ())
        pending = {}
        for layer in range(LAYERS):
            experts = ask(step, layer)
            if layer in pending:
                known.judge(pending.pop(layer), experts)
            known.learn(layer, experts, np.ones_like(experts), 1)
            target = layer + known.distance
            if target < LAYERS:
                scores = gate(step, target) if gate and known.wants_gate(target, 1) else None
                forecast = pending[target] = known.forecast(target, 1, gone, scores)
    return forecast


def chain(step, layer):
    """What a layer is asked for follows from the layer before."""
    kind = (step * 7 + step // 3) % 3
    return ids(*sorted({(kind * 4 + layer) % EXPERTS, (kind * 4 + 2 * layer + 1) % EXPERTS}))


def test_transitions_are_found_to_be_best_where_layers_follow_each_other():
    known = Forecaster(LAYERS, EXPERTS)
    forecast = run(known, 100, chain)
    recall = known.recall()
    assert set(recall) == {"transitions", "previous", "popularity"}
    assert recall["transitions"] > 0.95 > recall["popularity"]
    assert set(forecast.candidates[:2].tolist()) == set(chain(99, LAYERS - 1).tolist())
    assert forecast.chances[0] > 0.9
    assert forecast.chances[5] < 0.2


def test_a_gate_that_knows_is_believed_and_asked_for_each_step():
    known = Forecaster(LAYERS, EXPERTS, has_gate=True)
    draw = np.random.default_rng(0)
    table = draw.integers(0, EXPERTS, (200, LAYERS))

    def gate(step, layer):
        scores = np.zeros(EXPERTS, np.float32)
        scores[table[step, layer]] = 1
        return scores

    run(known, 200, lambda step, layer: ids(table[step, layer]), gate)
    assert known.recall()["gate"] == 1.0
    assert known.wants_gate(1, 1)
    run(known, 200, lambda step, layer: ids(table[step, layer]),
        lambda step, layer: -gate(step, layer))  # fmt: skip
    assert known.recall()["gate"] < 0.6


def test_chances_speak_of_the_missing_and_likelihood_of_those_here():
    known = Forecaster(LAYERS, EXPERTS)
    missing = np.zeros(EXPERTS, np.bool_)
    missing[6:] = True
    # Of those that are here, one is always asked for; of the missing, none ever.
    forecast = run(known, 100, lambda *_: ids(2), missing=missing)
    assert sorted(forecast.candidates.tolist()) == list(range(6, 12))
    assert not forecast.chances.any()
    assert forecast.likely[2] > 0.95
    assert not forecast.likely[6:].any()


def test_nothing_is_likely_before_enough_was_judged():
    known = Forecaster(LAYERS, EXPERTS)
    forecast = run(known, ENOUGH_FORECASTS // LAYERS - 1, chain)
    assert not forecast.chances.any()
    assert Forecaster(LAYERS, EXPERTS).recall() == {}


def test_prompts_that_begin_alike_ask_alike():
    known = Forecaster(LAYERS, EXPERTS)
    beginnings = ((5, 6, 7), (8, 9, 10))

    def ask(step, layer):
        return ids(step % 2 * 6, step % 2 * 6 + 1)

    run(known, 80, ask, parts=lambda step: [part(step, 0, beginnings[step % 2])])
    recall = known.recall()
    assert recall["prompt"] == pytest.approx(1.0)
    # Half of the popularity is that of the other kind of prompt.
    known.begin_step([part(1000, 0, beginnings[0])])
    assert set(known.forecast(0, 1, np.ones(EXPERTS, np.bool_), None).orders.shape) >= {EXPERTS}


def test_another_distance_starts_anew():
    known = Forecaster(LAYERS, EXPERTS)
    run(known, 60, chain)
    known.set_distance(2)
    assert known.recall() == {}
    forecast = run(known, 100, chain)
    assert set(forecast.candidates[:2].tolist()) == set(chain(99, LAYERS - 1).tolist())


def test_tables_stay_small_where_experts_are_many():
    assert Forecaster(58, 256, has_gate=True).nbytes / (58 * 256) < 100


def test_a_prompt_that_passes_layer_by_layer_is_known_afterwards_and_not_learned_from():
    known = Forecaster(2, 8)
    known.begin_step([part(1, 0, (7, 8, 9))], in_order=True)
    known.learn(0, ids(1, 2), ids(3, 3), 3)
    known.begin_step([part(1, 3, (5,))])
    assert known._buckets is not None, "the decoding steps know how it began"
    assert known._prompts.predict(known._buckets, 0) is None, "nothing is known of such prompts"
