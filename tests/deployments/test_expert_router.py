"""The adapter between Serve's router and the dispatcher, and what it needs of Ray's inside.

The pins at the end fail when another Ray moves what the adapter holds on to: then look at
deployments/expert_router.py before anything else.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter

from core.request import Request, SamplingParams
from deployments.dispatch_counts import counts_of, dispatch_page, dispatch_status
from deployments.expert_router import ExpertRouter
from deployments.replica_report import ReplicaReport, domain_hash
from deployments.routed_ask import decode_ask, encode_ask
from deployments.text_delta import Generation
from tests.deployments.test_dispatcher import IDLE, with_rates

PLACE = DeploymentID(name="Pinned", app_name="app")


@dataclass
class Replica:
    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)
    queue: int = 0
    max_ongoing_requests: int = 10
    is_cross_language: bool = False
    delay_s: float = 0.0

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(unique_id=self.name, deployment_id=PLACE)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(self.delay_s)
        return self.queue


def replica(name: str, report: ReplicaReport | None = IDLE, **more: int) -> Replica:
    stats = {} if report is None else {"report": report.to_floats()}
    return Replica(name, stats, **more)


def generation(name: str = "r", domain: str = "", tokens: int = 50) -> Generation:
    params = SamplingParams(max_tokens=tokens)
    return Generation(
        request=Request(request_id=name, prompt_ids=(1, 2, 3), params=params, domain=domain),
        confidence=1.0,
    )


def call(*args: Any, parent: str = "p") -> PendingRequest:
    metadata = RequestMetadata(request_id=parent, internal_request_id=parent)
    return PendingRequest(args=list(args), kwargs={}, metadata=metadata)


def ask(name: str = "r", domain: str = "", parent: str = "p") -> PendingRequest:
    return call(b"payload", encode_ask(generation(name, domain)), parent=parent)


async def router(*replicas: Replica, **kwargs: Any) -> ExpertRouter:
    made = ExpertRouter(
        deployment_id=PLACE,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    made.initialize_state(**kwargs)
    made.update_replicas(list(replicas))
    await asyncio.sleep(0.01)
    return made


def names(ranks: list[list[Replica]]) -> list[list[str]]:
    return [[one.name for one in rank] for rank in ranks]


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_ranks_are_the_dispatchers_order_one_replica_each() -> None:
    async def check() -> None:
        a, b = replica("a", with_rates(code=0.9)), replica("b", with_rates(code=0.2))
        made = await router(a, b)
        pending = ask(domain="code")
        assert names(await made.choose_replicas([b, a], pending)) == [["a"], ["b"]]
        assert pending.routing_context.should_backoff
        pending.future.cancel()
        await asyncio.sleep(0)
        assert made._dispatcher.open_tickets == 0

    run(check())


def test_other_calls_have_no_ask_and_go_to_the_shorter_queue() -> None:
    async def check() -> None:
        a, b = replica("a", queue=5), replica("b", queue=1)
        made = await router(a, b)
        for pending in (call(), call(b"x"), call(b"x", b"no ask"), call("x", 3), None):
            ranks = await made.choose_replicas([a, b], pending)
            assert sorted(name for rank in names(ranks) for name in rank) == ["a", "b"]
        assert (await made._choose_replica_for_request(call())).name == "b"
        assert made._dispatcher.open_tickets == 0

    run(check())


def test_a_call_is_counted_from_the_choice_to_its_end() -> None:
    async def check() -> None:
        a, b = replica("a"), replica("b")
        made = await router(a, b)
        chosen = []
        for number in range(6):
            pending = ask(f"r{number}", parent=f"p{number}")
            chosen.append((await made._choose_replica_for_request(pending)).name)
        await asyncio.sleep(0)
        assert sorted(chosen) == ["a"] * 3 + ["b"] * 3, "each choice knows those before it"
        assert made._dispatcher.open_tickets == 6
        for number, name in enumerate(chosen):
            made.on_request_completed(replica(name).replica_id, f"p{number}")
            made.on_request_completed(replica(name).replica_id, f"p{number}")
        await asyncio.sleep(0)
        assert made._dispatcher.open_tickets == 0 and not made._open and not made._placed

    run(check())


def test_a_call_is_in_no_report_that_was_made_before_a_replica_took_it() -> None:
    async def check() -> None:
        a, b = replica("a"), replica("b")
        made = await router(a, b)
        pending = ask("r0", parent="p0")
        found = await made._choose_replica_for_request(pending)
        await asyncio.sleep(0)
        local = made._dispatcher._sent.of(found.name)
        now_s = made._dispatcher._clock()
        made._dispatcher._sent.reported(found.name, now_s + 0.1)
        assert local.unseen == 1
        made.on_request_routed(pending, found.replica_id, None)
        made._dispatcher._sent.reported(found.name, now_s + 0.5)
        assert local.unseen == 0 and local.open == 1
        made.on_request_routed(pending, found.replica_id, None)

    run(check())


def test_a_burst_in_one_moment_gives_each_call_its_own_replica() -> None:
    """Two prompts of one HTTP request share Serve's request id, and neither may hang."""

    async def check() -> None:
        a, b = replica("a", with_rates(code=0.95)), replica("b", with_rates(law=0.95))
        made = await router(a, b)
        domains = ["code", "law"] * 8
        calls = [ask(f"r{i}", domain, parent="same") for i, domain in enumerate(domains)]
        found = await asyncio.wait_for(
            asyncio.gather(*(made._choose_replica_for_request(one) for one in calls)), 5
        )
        await asyncio.sleep(0)
        settled = [made._tried[f"r{i}"] for i in range(16)]
        assert settled == [(one.name,) for one in found]
        assert made._counts.elsewhere == 0, "no hint misses"
        for one in found:
            made.on_request_completed(one.replica_id, "same")
        await asyncio.sleep(0)
        assert made._dispatcher.open_tickets == 0

    run(check())


def test_a_replica_slow_to_tell_its_queue_does_not_mix_up_two_calls() -> None:
    """FIFOMixin alone gives the replica that answered first to the call that came first."""

    async def check() -> None:
        a, b = replica("a", with_rates(code=0.95)), replica("b", with_rates(law=0.95))
        made = await router(a, b)
        a.delay_s = 0.05
        for one in (a, b):
            made.replica_queue_len_cache.invalidate_key(one.replica_id)
        calls = [ask(f"r{i}", domain, f"p{i}") for i, domain in enumerate(("code", "law"))]
        found = await asyncio.gather(*(made._choose_replica_for_request(one) for one in calls))
        assert [one.name for one in found] == ["a", "b"]

    run(check())


def test_a_full_replica_is_passed_over_and_counted_where_it_went() -> None:
    async def check() -> None:
        a = replica("a", with_rates(code=0.9), queue=10)
        made = await router(a, replica("b", with_rates(code=0.2)))
        before = made._counts.elsewhere
        found = await made._choose_replica_for_request(ask(domain="code"))
        await asyncio.sleep(0)
        assert found.name == "b" and made._counts.elsewhere == before + 1
        assert made._dispatcher._sent.of("b").open == 1
        assert made._dispatcher._sent.of("a").open == 0

    run(check())


def test_a_request_that_was_refused_goes_to_another_replica() -> None:
    async def check() -> None:
        a, b = replica("a", with_rates(code=0.9)), replica("b", with_rates(code=0.2))
        made = await router(a, b, replica("c", with_rates(code=0.1)))
        went = []
        for _ in range(3):
            found = await made._choose_replica_for_request(ask("again", "code"))
            went.append(found.name)
            await asyncio.sleep(0)
            made.on_request_completed(found.replica_id, "p")
        assert went == ["a", "b", "c"]
        assert (await made._choose_replica_for_request(ask("other", "code"))).name == "a"

    run(check())


def test_a_cancelled_call_leaves_nothing_behind() -> None:
    async def check() -> None:
        full = replica("a", queue=10)
        made = await router(full)
        waits = asyncio.create_task(made._choose_replica_for_request(ask()))
        await asyncio.sleep(0.2)
        assert not waits.done() and made._dispatcher.open_tickets == 1
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await asyncio.sleep(0)
        assert made._dispatcher.open_tickets == 0 and not made._placed

    run(check())


def test_a_fault_of_the_dispatcher_fails_no_request_and_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        a, b = replica("a", queue=3), replica("b")
        made = await router(a, b)
        before = made._counts.errors

        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(made._dispatcher, "choose", broken)
        monkeypatch.setattr(made._dispatcher, "report", broken)
        a.routing_stats = {"report": with_rates(code=0.1).to_floats()}
        made.update_replicas([a, b])
        for number in range(3):
            found = await made._choose_replica_for_request(ask(f"r{number}"))
            assert found.name == "b"
        assert made._counts.errors == before + 4

    with caplog.at_level(logging.ERROR, "ray.serve"):
        logging.getLogger("ray.serve").addHandler(caplog.handler)
        run(check())
    logging.getLogger("ray.serve").removeHandler(caplog.handler)
    said = [r for r in caplog.records if "dispatcher failed" in r.getMessage()]
    assert len({id(r) for r in said}) == 1


def test_reports_that_make_no_sense_are_counted_and_used_no_more() -> None:
    async def check() -> None:
        a = replica("a")
        made = await router(a, replica("b"))
        before = made._counts.unreadable_reports
        for stats in ({"report": [1.0, 2.0]}, {"report": "x"}, {"report": None}, {}, {"x": 1}):
            a.routing_stats = stats
            made.update_replicas([a, replica("b")])
        assert made._counts.unreadable_reports == before + 2
        assert (await made.choose_replicas([a], ask()))[0][0].name == "a"

    run(check())


def test_without_a_prefix_cache_no_replica_is_preferred_for_a_prefix() -> None:
    async def check() -> None:
        made = await router(replica("a"), replica("b"), prefix_cache=False)
        await made._choose_replica_for_request(ask())
        assert len(made._dispatcher._prefixes) == 0

    run(check())


def test_a_request_without_text_or_with_any_labels_makes_an_ask() -> None:
    """42: empty content never breaks the router, which sees lengths and labels only."""
    for domain in ("", "code", "ø" * 1000, "\x00"):
        routed = decode_ask(encode_ask(generation(domain=domain)))
        assert routed is not None and routed.ask.domain == domain
        assert (routed.ask.prompt_tokens, routed.ask.max_tokens) == (3, 50)
        assert routed.ask.confidence == 1.0
    for nothing in (None, b"", "text", 7, b"\xc1", b"\x80"):
        assert decode_ask(nothing) is None


def test_the_gateways_status_and_metrics_tell_of_it() -> None:
    async def check() -> None:
        made = await router(replica("a"), replica("b"))
        await made._choose_replica_for_request(ask())

    run(check())
    status = dispatch_status()
    assert status["dispatch_decisions"] >= 1 and status["dispatch_by_cost"] >= 1
    page = dispatch_page().decode()
    labels = f'deployment="Pinned",gateway="{os.getpid()}",reason="cost"'
    assert f"coterie_dispatch_requests_total{{{labels}}}" in page
    assert counts_of("Pinned").cost_s > 0
    assert domain_hash("code") < 2**24


def test_one_line_a_decision_on_demand(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        made = await router(replica("a"), replica("b"))
        await made._choose_replica_for_request(ask("named"))

    log = logging.getLogger("ray.serve")
    log.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, "ray.serve"):
            run(check())
    finally:
        log.removeHandler(caplog.handler)
    lines = {r.getMessage() for r in caplog.records if "named ->" in r.getMessage()}
    assert len(lines) == 1 and "by cost: " in lines.pop()


def test_serve_has_what_the_adapter_holds_on_to() -> None:
    """Pins of Ray 2.60's private side."""
    assert issubclass(ExpertRouter, RequestRouter) and issubclass(ExpertRouter, FIFOMixin)
    hooks = {
        "choose_replicas": ["candidate_replicas", "pending_request"],
        "update_replicas": ["replicas"],
        "on_request_routed": ["pending_request", "replica_id", "result"],
        "on_request_completed": ["replica_id", "internal_request_id"],
        "_choose_replica_for_request": ["pending_request", "is_retry"],
    }
    for name, expected in hooks.items():
        parameters = list(inspect.signature(getattr(RequestRouter, name)).parameters)
        assert parameters == ["self", *expected], name
    match = FIFOMixin._get_pending_request_matching_metadata
    assert list(inspect.signature(match).parameters) == ["self", "request_metadata"]
    assert "_get_pending_request_matching_metadata" in inspect.getsource(
        FIFOMixin._fulfill_next_pending_request
    ), "FIFOMixin's hook for another call than the oldest"
    fields = PendingRequest.__dataclass_fields__
    assert {"args", "metadata", "future", "routing_context"} <= set(fields)
    from ray.serve._private import router as serve_router
    from ray.serve._private.constants import REQUEST_ROUTING_STATS_METHOD
    from ray.serve._private.request_router.replica_wrapper import RunningReplica

    assert REQUEST_ROUTING_STATS_METHOD == "record_routing_stats"
    assert isinstance(inspect.getattr_static(RunningReplica, "routing_stats"), property)
    ends = inspect.getsource(serve_router.AsyncioRouter._process_finished_request)
    assert "on_request_completed(" in ends, "each call that was sent is told to have ended"
    sends = inspect.getsource(serve_router.AsyncioRouter)
    assert "if queue_info.accepted:" in sends and ".on_request_routed(" in sends


def test_the_router_is_what_serve_pickles() -> None:
    from deployments.dispatch_settings import DispatchSettings
    from deployments.router_options import router_options

    assert router_options(1, DispatchSettings(), True) == {}
    assert router_options(2, DispatchSettings(policy="least_loaded"), True) == {}
    config = router_options(2, DispatchSettings(), False)["request_router_config"]
    made = config.get_request_router_class()
    assert made.__name__ == "ExpertRouter"
    assert config.request_router_kwargs["prefix_cache"] is False
    assert config.request_routing_stats_period_s == DispatchSettings().report_period_s
