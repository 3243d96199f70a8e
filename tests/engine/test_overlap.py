from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import Request, SamplingParams
from engine.overlap import Overlap


@dataclass(frozen=True)
class Someone:
    sequence_id: int

    @property
    def request(self) -> Request:
        return Request(
            request_id=str(self.sequence_id),
            prompt_ids=(1,),
            params=SamplingParams(max_tokens=1),
        )


def by_number(known: dict[int, np.ndarray]) -> Overlap:
    return Overlap(lambda request: known.get(int(request.request_id)))


def test_what_is_added_is_what_independent_tokens_would_ask_for_besides() -> None:
    draw = np.random.default_rng(0)
    known = {n: draw.random((3, 8)).astype(np.float32) for n in range(5)}
    running, candidates = [Someone(0), Someone(1), Someone(2)], [Someone(3), Someone(4)]
    found = by_number(known).added(candidates, running)
    for candidate, share in zip(candidates, found, strict=True):
        expected = 0.0
        for layer in range(3):
            for expert in range(8):
                unused = np.prod([1 - known[n][layer, expert] for n in range(3)])
                expected += unused * known[candidate.sequence_id][layer, expert]
        assert share == pytest.approx(expected / known[candidate.sequence_id].sum(), rel=1e-5)


@given(st.lists(st.sets(st.integers(0, 6)), max_size=12))
def test_what_is_kept_of_the_running_ones_is_what_would_be_reckoned_anew(
    batches: list[set[int]],
) -> None:
    draw = np.random.default_rng(1)
    known = {n: draw.random((2, 5)).astype(np.float32) for n in range(6)}  # 6 is unknown
    overlap = by_number(known)
    for batch in batches:
        running = [Someone(n) for n in sorted(batch)]
        found = overlap.added([Someone(0), Someone(5)], running)
        assert found == pytest.approx(by_number(known).added([Someone(0), Someone(5)], running))


def test_a_signature_is_asked_for_once_and_forgotten() -> None:
    asked = []

    def signature(request: Request) -> np.ndarray:
        asked.append(request.request_id)
        return np.ones((1, 4))

    overlap = Overlap(signature)
    for _ in range(3):
        overlap.added([Someone(1), Someone(2)], [Someone(3)])
    assert sorted(asked) == ["1", "2", "3"]
    overlap.forget(1)
    overlap.added([Someone(1), Someone(2)], [Someone(3)])
    assert sorted(asked) == ["1", "1", "2", "3"]
