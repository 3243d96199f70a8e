"""A rank without a model: who is admitted decides which experts its steps share.

Sequences replay routing of documents, one token a step. A step takes a constant and a part for each
distinct expert, as where reading experts is what takes time. A supervisor's hand-over is simulated
too: the order sees as many as a rank is shown.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from core.request import Request, SamplingParams
from deployments.settings import hand_over_limit
from engine.coherent_admission import AdmissionOrder
from expert_pool.routing_trace import RoutingTrace

PARAMS = SamplingParams(max_tokens=4)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """`used` [tokens, layers, experts]: what each token asks for."""

    domain: str
    used: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Member:
    """A request, as far as admission sees it."""

    sequence_id: int
    request: Request
    arrived_s: float
    tokens: int
    document: Document
    generated: int = 0
    deadline_s: float | None = None
    admitted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to; `distinct` is experts a layer of steps with all places taken."""

    distinct: float
    queue_s: npt.NDArray[np.float64]
    most_overtaken: int
    states: dict[str, int]

    @property
    def queue_p95_s(self) -> float:
        return float(np.percentile(self.queue_s, 95))


def documents_of(trace: RoutingTrace, domain: str, most_tokens: int = 128) -> list[Document]:
    """The documents of a trace, long ones in pieces."""
    used = np.zeros((*trace.demands.shape[:2], trace.num_experts + 1), dtype=np.bool_)
    np.put_along_axis(used, trace.demands, True, axis=2)  # ABSENT lands in the last, cut off
    used = used[:, :, :-1]
    bounds = [*trace.doc_offsets.tolist(), len(used)]
    pieces = []
    for start, stop in pairwise(bounds):
        for at in range(start, stop, most_tokens):
            if min(stop, at + most_tokens) - at >= 8:
                pieces.append(Document(domain, used[at : min(stop, at + most_tokens)]))
    return pieces


def synthetic_documents(
    domains: int = 6,
    of_each: int = 12,
    tokens: int = 48,
    layers: int = 4,
    experts: int = 32,
    top_k: int = 4,
    taste: float = 1.0,
    seed: int = 0,
) -> list[Document]:
    """Each domain favours some experts, each document a few of its own; the rest is chance."""
    draw = np.random.default_rng(seed)
    found = []
    for domain in range(domains):
        liked = taste * draw.standard_normal((layers, experts))
        for _ in range(of_each):
            own = 0.5 * draw.standard_normal((layers, experts))
            scores = liked + own + draw.gumbel(size=(tokens, layers, experts))
            used = np.zeros(scores.shape, dtype=np.bool_)
            np.put_along_axis(used, np.argsort(-scores, axis=2)[:, :, :top_k], True, axis=2)
            found.append(Document(f"domain {domain}", used))
    return found


def domain_signatures(documents: list[Document]) -> dict[str, npt.NDArray[np.float32]]:
    """By domain, the share of tokens that choose each expert."""
    by_domain: dict[str, list[npt.NDArray[np.bool_]]] = {}
    for document in documents:
        by_domain.setdefault(document.domain, []).append(document.used)
    return {
        name: np.concatenate(parts).mean(axis=0).astype(np.float32)
        for name, parts in by_domain.items()
    }


def exponential_arrivals(requests: int, seed: int) -> npt.NDArray[np.float64]:
    """Arrival times that only scale: `simulate` stretches them to the load."""
    return np.cumsum(np.random.default_rng(seed).exponential(size=requests))


def simulate(
    documents: list[Document],
    places: int,
    load: float,
    arrivals: npt.NDArray[np.float64],
    lengths: npt.NDArray[np.int64] | None = None,
    seed: int = 0,
    by_document: bool = False,
    **order_settings: Any,
) -> Outcome:
    """Runs all requests to their end. `load` is in tokens that places take at one second a step;
    `order_settings` go to `AdmissionOrder`. Each domain has an equal share of the requests;
    `by_document`: signatures are those of the documents themselves, which nobody can know."""
    draw = np.random.default_rng(seed)
    domains = sorted({document.domain for document in documents})
    of_domain = [[d for d in documents if d.domain == name] for name in domains]
    chosen = []
    for _ in arrivals:
        among = of_domain[draw.integers(len(domains))]
        chosen.append(among[draw.integers(len(among))])
    tokens = [len(d.used) for d in chosen] if lengths is None else lengths.tolist()
    times = (arrivals - arrivals[0]) / (arrivals[-1] - arrivals[0])
    times = times * sum(tokens) / places / load
    typical = _typical_distinct(chosen, places, draw)
    signatures = domain_signatures(documents)
    exact = {d: d.used.mean(axis=0) for d in chosen} if by_document else {}
    document_of: dict[str, Document] = {}
    now_s = 0.0
    order = AdmissionOrder(
        lambda request: (
            exact[document_of[request.request_id]] if by_document else signatures[request.domain]
        ),
        clock=lambda: now_s,
        batch_sequences=places,
        **order_settings,
    )
    shown = hand_over_limit(places, grouping=True)
    coming = deque(enumerate(zip(times.tolist(), tokens, chosen, strict=True)))
    behind: deque[Member] = deque()
    waiting: list[Member] = []
    running: list[Member] = []
    queue_s, full, states, most = [], [], {}, 0
    while coming or behind or running:
        if not (behind or waiting or running):
            now_s = max(now_s, coming[0][1][0])
        while coming and coming[0][1][0] <= now_s:
            number, (at_s, length, document) = coming.popleft()
            request = Request(
                request_id=str(number), prompt_ids=(1,), params=PARAMS, domain=document.domain
            )
            document_of[request.request_id] = document
            behind.append(Member(number, request, at_s, length, document))
        while True:
            while behind and len(waiting) + len(running) < shown:
                waiting.append(behind.popleft())
            if not waiting or len(running) == places:
                break
            member = waiting[order.pick(waiting, running)]
            order.admitted(member, waiting)
            most = max(most, *(order.overtaken(other.sequence_id) for other in waiting))
            waiting.remove(member)
            running.append(member)
            queue_s.append(now_s - member.arrived_s)
        used = np.zeros_like(chosen[0].used[0])
        for member in running:
            used |= member.document.used[member.generated % len(member.document.used)]
            member.generated += 1
        distinct = int(used.sum())
        order.stepped(running, len(running), distinct)
        states[order.state] = states.get(order.state, 0) + 1
        if len(running) == places:
            full.append(distinct)
        for member in [m for m in running if m.generated >= m.tokens]:
            running.remove(member)
            order.left(member.sequence_id)
        now_s += 0.3 + 0.7 * distinct / typical
    layers = chosen[0].used.shape[1]
    return Outcome(float(np.mean(full)) / layers, np.array(queue_s), most, states)


def _typical_distinct(chosen: list[Document], places: int, draw: np.random.Generator) -> float:
    found = []
    for _ in range(200):
        some = [chosen[at].used for at in draw.integers(len(chosen), size=places)]
        rows = [used[draw.integers(len(used))] for used in some]
        found.append(np.any(rows, axis=0).sum())
    return float(np.mean(found))
