"""Admission by overlap in the batcher and in an engine: same answers, everybody served."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.request import Request
from engine.batcher import Batcher
from engine.coherent_admission import AdmissionOrder
from engine.kv_pages import KvPages
from engine.sequence import Sequence
from tests.engine.test_batcher import BLOCK, Simulated, sequence
from tests.engine.test_engine import request, run_all, tiny_engine, tokens_of

MOST_OVERTAKES = 3


def signature(asked: Request) -> np.ndarray | None:
    likes = {"left": [1.0, 0.0], "right": [0.0, 1.0]}
    return np.array([likes[asked.domain]]) if asked.domain else None


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 20),
            st.integers(1, 12),
            st.sampled_from(["left", "right", ""]),
            st.integers(0, 6),
            st.sampled_from(["interactive", "batch"]),
        ),
        min_size=1,
        max_size=10,
    ),
    blocks=st.integers(5, 16),
    places=st.integers(1, 4),
    budget=st.integers(4, 12),
)
def test_every_sequence_ends_and_nobody_is_overtaken_too_often(
    requests, blocks, places, budget
) -> None:
    pages = KvPages(blocks, BLOCK)
    order = AdmissionOrder(signature, MOST_OVERTAKES, lambda: 0.0, "on", batch_sequences=places)
    engine = Simulated(Batcher(pages, places, budget, order=order), pages)
    todo = [
        (gap, sequence(n, prompt, tokens, first=50 * n, domain=domain, priority=priority))
        for n, (prompt, tokens, domain, gap, priority) in enumerate(requests)
    ]
    ended: list[Sequence] = []
    clock = 0
    while len(ended) < len(todo):
        for gap, member in todo:
            if gap == clock:
                engine.batcher.add(member)
        _, now = engine.step()
        ended += now
        clock += 1
        assert all(order.overtaken(n) <= MOST_OVERTAKES for n in range(len(todo)))
        assert clock < 1500
    assert engine.pages.used == 0
    assert not (order._overtaken or order._by_choice or order._overlap._known)


def test_the_batcher_admits_whom_the_order_picks() -> None:
    pages = KvPages(60, BLOCK)
    order = AdmissionOrder(signature, MOST_OVERTAKES, lambda: 0.0, "on", batch_sequences=2)
    engine = Simulated(Batcher(pages, 2, 16, order=order), pages)
    engine.batcher.add(sequence(0, 4, tokens=30, domain="left"))
    engine.step()
    for number, domain in enumerate(("right", "right", "left", "left"), start=1):
        engine.batcher.add(sequence(number, 4, tokens=2, first=100 * number, domain=domain))
    admitted = []
    for _ in range(12):
        batch, _ = engine.step()
        admitted += [
            part.sequence_id for part in batch.plan.parts if part.start == 0 and not part.is_decode
        ]
    assert admitted == [3, 4, 1, 2]


def test_answers_are_the_same_whoever_goes_first() -> None:
    requests = [
        msgspec.structs.replace(request(str(n), 6 + n, seed=n), domain=("left", "right")[n % 2])
        for n in range(12)
    ]
    answers, overtaken = {}, {}
    for grouping in ("off", "on"):
        engine = tiny_engine(grouping=grouping, max_sequences=2, max_overtakes=MOST_OVERTAKES)
        try:
            # What the pool knows of both is given here: a tiny model has no tastes to learn.
            engine.pool.signature = lambda domain, *_: signature(  # type: ignore[method-assign]
                msgspec.structs.replace(requests[0], domain=domain)
            )
            for one in requests:
                engine.add(one)
            overtaken[grouping] = 0
            answers[grouping] = {}
            while engine.has_work():
                result = engine.step()
                if result.stats.batch is not None:
                    overtaken[grouping] += result.stats.batch.overtaken
                    assert result.stats.batch.grouping == grouping
                for output in result.outputs:
                    answers[grouping].setdefault(output.request_id, []).extend(output.token_ids)
            engine.check_invariants()
        finally:
            engine.close()
    assert answers["on"] == answers["off"]
    assert overtaken["off"] == 0 < overtaken["on"]


def test_an_engine_groups_by_what_its_pool_has_learned() -> None:
    engine = tiny_engine(max_sequences=2)
    try:
        for n in range(8):
            engine.add(msgspec.structs.replace(request(str(n), 5, seed=n), domain="some"))
        found = run_all(engine)
        assert all(len(tokens_of(outputs)) == 6 for outputs in found.values())
        order = engine._batcher.order
        assert order is not None and order.state == "probing"
        assert not (order._overtaken or order._overlap._known)
        engine.check_invariants()
    finally:
        engine.close()
    alone = tiny_engine(max_sequences=1)
    try:
        assert alone._batcher.order is None  # nobody to be grouped with
    finally:
        alone.close()
