"""From profiled runs to rows, figures a layer, and sentences that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from accounting.activation import (
    distinct_experts,
    expected_distinct_experts,
    knee,
    loads,
    overlap,
    router_entropy,
    sequence_activation_ratio,
    top_share,
)

if TYPE_CHECKING:
    from engine.profile import ProfiledRun

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_SAMPLES = 64
_EVEN_ENTROPY = 0.97
_SKEWED_ENTROPY = 0.85


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One group of prompts. Ratios are shares of 1; times are of this machine and this run."""

    label: str
    prompt_tokens: int | None
    """Length that its prompts were cut to; None: their own."""
    runs: int
    sequence_activation_mean: float
    sequence_activation_sd: float
    sequence_activation_least: float
    sequence_activation_most: float
    router_entropy: float
    """Mean over layers of entropy / log E."""
    top_10_share: float
    top_30_share: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    tpot_ms_p50: float
    tpot_ms_p95: float
    bytes_a_token: int
    """Read from disk or host a token that passed the model."""
    memory_bytes: int
    """Most resident memory of the process while one of its prompts ran."""


def row_of(
    label: str, prompt_tokens: int | None, runs: Sequence[ProfiledRun], num_experts: int
) -> ProfileRow:
    """The figures of some runs."""
    ratios = [sequence_activation_ratio(run.expert_ids, num_experts) for run in runs]
    load = sum(loads(run.expert_ids, num_experts) for run in runs)
    assert isinstance(load, np.ndarray)  # noqa: S101  # there is at least one run
    ttft_ms = [run.ttft_s * 1e3 for run in runs]
    tpot_ms = [seconds * 1e3 for run in runs for seconds in run.token_s] or [0.0]
    tokens = sum(len(run.expert_ids) for run in runs)
    return ProfileRow(
        label=label,
        prompt_tokens=prompt_tokens,
        runs=len(runs),
        sequence_activation_mean=round(float(np.mean(ratios)), 4),
        sequence_activation_sd=round(float(np.std(ratios)), 4),
        sequence_activation_least=round(min(ratios), 4),
        sequence_activation_most=round(max(ratios), 4),
        router_entropy=round(float(np.mean([router_entropy(layer) for layer in load])), 4),
        top_10_share=round(float(np.mean([top_share(layer, 10) for layer in load])), 4),
        top_30_share=round(float(np.mean([top_share(layer, 30) for layer in load])), 4),
        ttft_ms_p50=round(float(np.percentile(ttft_ms, 50)), 2),
        ttft_ms_p95=round(float(np.percentile(ttft_ms, 95)), 2),
        tpot_ms_p50=round(float(np.percentile(tpot_ms, 50)), 2),
        tpot_ms_p95=round(float(np.percentile(tpot_ms, 95)), 2),
        bytes_a_token=round(sum(run.bytes_read for run in runs) / max(tokens, 1)),
        memory_bytes=max(run.memory_bytes for run in runs),
    )


class ProfileReport:
    """All rows, the distinct experts by batch size, and each label's load by layer."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.num_experts = num_experts
        self.top_k = top_k
        self.rows: list[ProfileRow] = []
        self.loads: dict[str, Any] = {}
        """[layers, num_experts] by label."""
        self._ids: list[Any] = []

    def add(self, label: str, prompt_tokens: int | None, runs: Sequence[ProfiledRun]) -> None:
        """One group's runs. Loads of the same label at several lengths add up."""
        self.rows.append(row_of(label, prompt_tokens, runs, self.num_experts))
        ids = np.concatenate([run.expert_ids for run in runs])
        self._ids.append(ids)
        self.loads[label] = self.loads.get(label, 0) + loads(ids, self.num_experts)

    def distinct_by_batch(self) -> list[dict[str, float]]:
        """Distinct experts a layer in a step of so many tokens, seen and if drawn evenly."""
        ids = np.concatenate(self._ids)
        return [
            {
                "batch": batch,
                "distinct": round(distinct_experts(ids, self.num_experts, batch, _SAMPLES, 0), 2),
                "even": round(expected_distinct_experts(self.num_experts, self.top_k, batch), 2),
            }
            for batch in BATCHES
        ]

    def memory_knee(self) -> int | None:
        """Prompt length from which a token costs twice the memory; None where none does."""
        by_length: dict[int, int] = {}
        for row in self.rows:
            if row.prompt_tokens is not None:
                by_length[row.prompt_tokens] = max(
                    row.memory_bytes, by_length.get(row.prompt_tokens, 0)
                )
        sizes = sorted(by_length)
        return knee(sizes, [float(by_length[size]) for size in sizes]) if len(sizes) > 2 else None

    def as_dict(self) -> dict[str, Any]:
        """Everything but the loads, for JSON."""
        return {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "rows": [asdict(row) for row in self.rows],
            "distinct_by_batch": self.distinct_by_batch(),
            "memory_knee_tokens": self.memory_knee(),
            "reading": self.reading(),
        }

    def reading(self) -> list[str]:
        """What the figures say, in sentences."""
        sentences = [self._reading_of_concentration(), self._reading_of_batches()]
        sentences += self._reading_of_labels()
        at = self.memory_knee()
        if at is not None:
            sentences.append(
                f"Beyond {at} prompt tokens, one more costs at least twice the memory."
            )
        return sentences

    def _reading_of_concentration(self) -> str:
        entropy = float(np.mean([row.router_entropy for row in self.rows]))
        share = float(np.mean([row.top_10_share for row in self.rows]))
        if entropy >= _EVEN_ENTROPY:
            what = "nearly evenly: a small pool will miss often, whatever it keeps"
        elif entropy >= _SKEWED_ENTROPY:
            what = "unevenly: a pool smaller than the model will hit clearly more often than chance"
        else:
            what = "very unevenly: a small pool will hit far more often than chance"
        return (
            f"Experts are used {what} (entropy {entropy:.2f} of 1; the top tenth takes "
            f"{share:.0%} of the picks)."
        )

    def _reading_of_batches(self) -> str:
        one, *_, last = self.distinct_by_batch()
        return (
            f"A step of one token needs {one['distinct']:.1f} experts a layer, one of "
            f"{int(last['batch'])} needs {last['distinct']:.1f} of {self.num_experts} "
            f"({last['even']:.1f} if they were drawn evenly)."
        )

    def _reading_of_labels(self) -> list[str]:
        names = list(self.loads)
        pairs = [
            (overlap(self.loads[a], self.loads[b], 25), a, b)
            for at, a in enumerate(names)
            for b in names[at + 1 :]
        ]
        if not pairs:
            return []
        most, least = max(pairs), min(pairs)
        if len(pairs) == 1:
            return [
                f"{most[1]} and {most[2]} have {most[0]:.0%} of their busiest quarter of experts "
                "in common."
            ]
        return [
            f"The busiest quarter of experts is most alike for {most[1]} and {most[2]} "
            f"({most[0]:.0%} in common) and least for {least[1]} and {least[2]} ({least[0]:.0%})."
        ]
