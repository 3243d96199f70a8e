"""Requests whose routing is known: documents of routing traces, joined with recorded arrivals.

A document is what one request would pass through the model, row by row, with the experts that
each row chose. Where it came is drawn by seed; when, is what a trace of a real service says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.load.arrivals import Arrival
from core.errors import SettingsError
from expert_pool.oracle import ABSENT
from expert_pool.routing_trace import RoutingTrace
from expert_pool.tables import IntArray

UNKNOWN = ""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """`expert_ids` [rows, layers, k] of one request; its first `prompt_rows` come at once.

    `weights`, where known, are what the router gave each.
    """

    name: str
    domain: str
    expert_ids: IntArray
    prompt_rows: int = 1
    weights: npt.NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        """Tokens that pass the model."""
        return len(self.expert_ids)

    def cut(self, begin: int, rows: int) -> Document:
        """A part of it, passed row by row."""
        weights = None if self.weights is None else self.weights[begin : begin + rows]
        ids = self.expert_ids[begin : begin + rows]
        return Document(self.name, self.domain, ids, 1, weights)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRequest:
    """A document that arrives `at_s`; `label` and `confidence` are what a classifier says of it."""

    number: int
    at_s: float
    document: Document
    label: str = UNKNOWN
    confidence: float = 0.0


@dataclass(frozen=True, slots=True)
class Labelling:
    """How well domains are told: shares of requests with a wrong label and with none."""

    wrong: float = 0.05
    unknown: float = 0.03

    def of(
        self, domain: str, domains: Sequence[str], draw: np.random.Generator
    ) -> tuple[str, float]:
        """(label, confidence); a wrong label is less sure of itself, on average."""
        chance = float(draw.random())
        if chance < self.unknown:
            return UNKNOWN, 0.0
        others = [name for name in domains if name != domain]
        if chance < self.unknown + self.wrong and others:
            return others[int(draw.integers(len(others)))], float(draw.uniform(0.5, 0.95))
        return domain, float(draw.uniform(0.7, 1.0))


def documents_of(trace: RoutingTrace, domain: str) -> list[Document]:
    """The documents of a trace, all of one domain, row by row."""
    ends = [*trace.doc_offsets[1:].tolist(), len(trace.demands)]
    found = []
    for number, (begin, end) in enumerate(zip(trace.doc_offsets.tolist(), ends, strict=True)):
        weights = None if trace.weights is None else trace.weights[begin:end]
        ids = trace.demands[begin:end]
        if len(ids):  # some files end with an offset that nothing follows
            found.append(Document(f"{domain}-{number}", domain, ids, 1, weights))
    return found


def read_labelled(path: Path) -> tuple[list[Document], int]:
    """Documents that `benchmarks.domain_traces` saved, and the experts of a layer.

    Raises SettingsError for another file.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            ids = stored["expert_ids"].astype(np.int64)
            offsets = stored["doc_offsets"].tolist()
            domains, prompts = stored["domains"].tolist(), stored["prompt_rows"].tolist()
            num_experts = int(stored["num_experts"])
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{path}: not a trace with domains: {error}; delete it") from error
    ends = [*offsets[1:], len(ids)]
    rows = zip(domains, prompts, offsets, ends, strict=True)
    return [
        Document(f"{domain}-{number}", domain, ids[begin:end], prompt)
        for number, (domain, prompt, begin, end) in enumerate(rows)
    ], num_experts


def one_by_one(documents: Sequence[Document]) -> list[Document]:
    """The same documents with every row in a step of its own."""
    return [document.cut(0, document.rows) for document in documents]


def request_mix(
    documents: Sequence[Document],
    arrivals: Sequence[Arrival],
    requests: int,
    seed: int,
    labelling: Labelling,
    rows: tuple[int, int] | None = None,
) -> list[RoutedRequest]:
    """`requests` documents at the times of the arrivals, beginning anywhere in these.

    Every domain comes as often as the others; documents in random order, again when all have
    come. `rows`, least and most: a document is cut to as many rows as the arrival's answer has
    tokens, within these bounds, at a random place. Raises SettingsError for too few arrivals.
    """
    if len(arrivals) < requests:
        raise SettingsError(f"expected at least {requests} arrivals, found {len(arrivals)}")
    draw = np.random.default_rng(seed)
    by_domain: dict[str, list[Document]] = {}
    for document in documents:
        by_domain.setdefault(document.domain, []).append(document)
    domains = sorted(by_domain)
    begin = int(draw.integers(len(arrivals) - requests + 1))
    some = arrivals[begin : begin + requests]
    stacks: dict[str, list[Document]] = {name: [] for name in domains}
    mixed = []
    for number, arrival in enumerate(some):
        name = domains[int(draw.integers(len(domains)))]
        if not stacks[name]:
            order = draw.permutation(len(by_domain[name])).tolist()
            stacks[name] = [by_domain[name][at] for at in order]
        document = stacks[name].pop()
        if rows is not None:
            length = min(max(arrival.output_tokens, rows[0]), rows[1], document.rows)
            document = document.cut(int(draw.integers(document.rows - length + 1)), length)
        label, confidence = labelling.of(name, domains, draw)
        at_s = arrival.at_s - some[0].at_s
        mixed.append(RoutedRequest(number, at_s, document, label, confidence))
    return mixed


def paced(requests: Sequence[RoutedRequest], rate: float) -> list[RoutedRequest]:
    """The same requests with the spacing of their arrivals stretched to `rate` a second."""
    factor = (len(requests) / rate) / max(requests[-1].at_s, 1e-9)
    return [
        RoutedRequest(x.number, x.at_s * factor, x.document, x.label, x.confidence)
        for x in requests
    ]


def distinct_of(ids: IntArray, num_experts: int) -> IntArray:
    """How often each expert is chosen by the rows `ids` [rows, layers, k]: [layers, experts]."""
    layers = ids.shape[1]
    shifted = ids + np.arange(layers)[None, :, None] * num_experts
    flat = shifted[ids != ABSENT]
    return np.bincount(flat, minlength=layers * num_experts).reshape(layers, num_experts)
