"""The simulator keeps its books, and on a synthetic trace dispatcher and grouping pay."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.dispatch_simulator import DispatchSimulator
from benchmarks.routed_requests import (
    Document,
    Labelling,
    distinct_of,
    one_by_one,
    paced,
    request_mix,
)
from benchmarks.simulated_replica import MachineModel, ReplicaShape
from benchmarks.simulated_routers import DomainBound, Experts, LeastLoaded, Placed, RoundRobin
from core.errors import SettingsError
from tests.benchmarks.synthetic_documents import (
    EXPERTS,
    LAYERS,
    TOP_K,
    synthetic_arrivals,
    synthetic_documents,
)

MACHINE = MachineModel(step_s=0.018, row_s=0.0012, expert_s=0.00012, miss_s=0.003)
SHAPE = ReplicaShape(EXPERTS, LAYERS, TOP_K, EXPERTS // 2, 8, MACHINE)
REPLICAS = 4
OVERTAKES = 32


def some_requests(number=40, seed=0, rows=(16, 48), labelling=None, documents=None):
    documents = synthetic_documents() if documents is None else documents
    arrivals = synthetic_arrivals(number, seed)
    return request_mix(documents, arrivals, number, seed, labelling or Labelling(), rows)


def simulate(requests, make_router, shape=SHAPE, replicas=REPLICAS, warm_up=0.0):
    run = DispatchSimulator(shape, replicas, requests, make_router, warm_up)
    return run, run.run()


def test_every_row_passes_once_and_every_request_ends():
    requests = paced(some_requests(), 20.0)
    run, outcome = simulate(requests, lambda clock: LeastLoaded(0))
    assert sum(x.counts.rows for x in run.replicas) == sum(x.document.rows for x in requests)
    assert sorted(x.number for x in outcome.finished) == list(range(len(requests)))
    for one in outcome.finished:
        assert one.arrived_s <= one.admitted_s < one.ended_s
    for replica in run.replicas:
        assert replica.outstanding == replica.outstanding_rows == 0
        assert 0 < replica.counts.misses <= replica.counts.accesses


def test_the_same_seed_gives_the_same_run():
    requests = paced(some_requests(), 30.0)
    outcomes = [simulate(requests, lambda clock: Experts(3, clock))[1] for _ in range(2)]
    assert outcomes[0] == outcomes[1]


def test_a_lone_request_misses_what_one_pool_would():
    document = Document("one", "law", synthetic_documents(1, 1)[0].expert_ids)
    request = replace(some_requests(1, documents=[document])[0], document=document)
    run, _ = simulate([request], lambda clock: LeastLoaded(0), replicas=1)
    # With a slot for every expert, each is missed once.
    whole, _ = simulate(
        [request], lambda clock: LeastLoaded(0), replace(SHAPE, slots=EXPERTS), replicas=1
    )
    used = np.count_nonzero(distinct_of(document.expert_ids, EXPERTS))
    assert whole.replicas[0].counts.misses == used
    assert run.replicas[0].counts.misses >= used
    assert run.replicas[0].counts.accesses == document.rows * LAYERS * TOP_K


def test_prompts_pass_in_one_step():
    documents = [Document(x.name, x.domain, x.expert_ids, 32) for x in synthetic_documents()]
    requests = some_requests(1, rows=None, documents=documents)
    run, _ = simulate(requests, lambda clock: LeastLoaded(0), replicas=1)
    assert run.replicas[0].counts.steps == 1 + 48 - 32
    separate, _ = simulate(
        [replace(x, document=one_by_one([x.document])[0]) for x in requests],
        lambda clock: LeastLoaded(0),
        replicas=1,
    )
    assert separate.replicas[0].counts.steps == 48


def test_a_placement_can_be_played_again():
    requests = paced(some_requests(), 30.0)
    first, outcome = simulate(requests, lambda clock: RoundRobin(0))
    again, replayed = simulate(requests, lambda clock: Placed(outcome.placed))
    assert replayed == outcome
    assert [x.counts for x in first.replicas] == [x.counts for x in again.replicas]


def test_bound_domains_stay_where_they_are_bound():
    requests = paced(some_requests(60), 30.0)
    domains = {x.document.domain for x in requests}
    _, outcome = simulate(requests, lambda clock: DomainBound(0, sorted(domains), REPLICAS))
    where = {}
    for routed, replica in zip(requests, outcome.placed, strict=True):
        where.setdefault(routed.document.domain, set()).add(replica)
    assert sorted(next(iter(x)) for x in where.values()) == [0, 1, 2, 3]
    assert all(len(x) == 1 for x in where.values())


def test_labels_are_wrong_and_missing_as_often_as_asked():
    made = some_requests(400, labelling=Labelling(wrong=0.2, unknown=0.1))
    wrong = np.mean([x.label not in ("", x.document.domain) for x in made])
    unknown = np.mean([x.label == "" for x in made])
    assert wrong == pytest.approx(0.2, abs=0.06)
    assert unknown == pytest.approx(0.1, abs=0.05)


def test_too_few_arrivals_are_refused():
    with pytest.raises(SettingsError, match="at least 5 arrivals, found 4"):
        request_mix(synthetic_documents(), synthetic_arrivals(4), 5, 0, Labelling())


def test_the_dispatcher_misses_less_and_keeps_nobody_waiting():
    misses, waits = np.zeros(2), np.zeros(2)
    for seed in (0, 1):
        # About a tenth more than what least-loaded replicas with full batches keep up with.
        requests = paced(some_requests(600, seed), 15.0)
        _, least = simulate(requests, lambda clock: LeastLoaded(0), warm_up=0.4)
        _, ours = simulate(requests, lambda clock: Experts(0, clock), warm_up=0.4)
        misses += least.misses_per_token, ours.misses_per_token
        waits += least.queue_s(95), ours.queue_s(95)
    assert misses[1] <= 0.85 * misses[0]
    assert waits[1] <= 1.1 * waits[0]


def test_grouping_asks_for_fewer_experts_at_the_same_wait():
    # There must be some to choose from.
    documents = synthetic_documents(domains=6)
    requests = paced(some_requests(300, seed=1, documents=documents), 5.0)
    grouping = replace(SHAPE, max_overtakes=OVERTAKES)
    fifo, ours = (
        simulate(requests, lambda clock: LeastLoaded(0), shape, replicas=1, warm_up=0.3)[1]
        for shape in (SHAPE, grouping)
    )

    def distinct(outcome):
        assert outcome.counts.full_steps > 200
        return outcome.counts.full_accesses / outcome.counts.full_steps

    assert distinct(ours) <= 0.92 * distinct(fifo)
    assert ours.queue_s(95) <= 1.1 * fifo.queue_s(95)
