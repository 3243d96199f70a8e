"""Labels in a live pool: whose rows chose what, what is expected then, what hints read."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from core.step import SequencePart
from expert_pool import expectations, preload
from expert_pool.domain_popularity import Label
from expert_pool.expectations import LEARN_EVERY
from expert_pool.step_rows import MOST_SEQUENCES, StepRows
from expert_pool.tables import State
from tests.expert_pool.fake_experts import FakeIndex, FakeShape, random_routing
from tests.expert_pool.test_pool import open_pool, slots_bytes

SHAPE = FakeShape(num_layers=2, num_experts=16, top_k=2, hidden=16, width=8)
HOME = {"code": (0, 1, 2), "law": (8, 9, 10), "": (4, 5)}


@pytest.fixture
def index(tmp_path):
    return FakeIndex(tmp_path / "model", SHAPE)


def part(number, tokens=1, domain="", session="", tenant="t", start=0):
    return SequencePart(
        sequence_id=number,
        start=start,
        token_ids=(1,) * tokens,
        block_ids=(0,),
        is_decode=tokens == 1,
        wants_logits=True,
        domain=domain,
        session=session,
        tenant=tenant,
    )


def serve(pool, model, parts, draw):
    """One step in which each part's tokens choose among their domain's experts."""
    rows = [part for part in parts for _ in part.token_ids]
    pool.begin_step(parts)
    for layer in range(SHAPE.num_layers):
        hidden, _, weights = random_routing(SHAPE, len(rows), 1)
        chosen = [draw.permutation(HOME.get(row.domain, HOME[""]))[:2].tolist() for row in rows]
        model.layers[layer](hidden, torch.tensor(chosen), weights)
    return pool.end_step()


def teach(pool, model, steps=20):
    draw = np.random.default_rng(0)
    for step in range(steps):
        parts = (
            part(3 * step, 6, "code", "chat"),
            part(3 * step + 1, 5, "law"),
            part(3 * step + 2, 4),
        )
        serve(pool, model, parts, draw)


def top(rates, number):
    return set(np.argsort(-rates, kind="stable")[:number].tolist())


def test_a_step_of_mixed_labels_teaches_each_its_own_rows(index):
    pool, model = open_pool(index)
    teach(pool, model)
    known = pool.expectations.popularity
    for layer in range(SHAPE.num_layers):
        assert top(known.of_domain("code")[layer], 3) == set(HOME["code"])
        assert top(known.of_domain("law")[layer], 3) == set(HOME["law"])
    assert known.of_domain("code")[0].sum() == pytest.approx(SHAPE.top_k, rel=0.01)
    assert known.expected(Label("t", "", "chat"))[0, list(HOME["code"])].sum() > 1.0
    assert known.of_everyone()[0].sum() == pytest.approx(SHAPE.top_k, rel=0.01)
    assert known.of_everyone()[0, list(HOME[""])].sum() > 0.3, "rows without a label are everyone's"
    pool.close()


def test_rows_of_several_forward_calls_are_told_apart(index):
    """A stock runner passes the parts of a step one after another."""
    pool, model = open_pool(index)
    parts = (part(1, 2, "code"), part(2, 3, "law"))
    pool.begin_step(parts)
    for layer in range(2):
        for offset, count, experts in ((0, 2, (0, 1)), (2, 3, (8, 9))):
            pool.row_offset = offset
            hidden, _, weights = random_routing(SHAPE, count, 1)
            model.layers[layer](hidden, torch.tensor([experts] * count), weights)
    pool.end_step()
    code, law = (pool.expectations.popularity._domains.find("t", name) for name in HOME if name)
    assert np.flatnonzero(code.counts[1]).tolist() == [0, 1]
    assert np.flatnonzero(law.counts[1]).tolist() == [8, 9]
    assert (code.tokens.tolist(), law.tokens.tolist()) == ([2, 2], [3, 3])
    pool.close()


def test_row_chunks_are_told_apart(index):
    pool, model = open_pool(index, scratch_bytes=2**20)
    draw = np.random.default_rng(0)
    serve(pool, model, (part(1, 1500, "code"), part(2, 1500, "law")), draw)
    known = pool.expectations.popularity
    assert top(known.of_domain("code")[0], 3) == set(HOME["code"])
    assert known._domains.find("t", "code").counts[0].sum() == 3000
    assert known._domains.find("t", "law").counts[0, list(HOME["law"])].sum() == 3000
    pool.close()


def test_decode_steps_teach_now_and_then_and_prompts_always(index):
    pool, model = open_pool(index)
    draw = np.random.default_rng(0)
    row = None
    for step in range(LEARN_EVERY):
        serve(pool, model, (part(1, 1, "code", start=step + 5),), draw)
        row = pool.expectations.popularity._domains.find("t", "code")
        assert (row is not None) == (step == LEARN_EVERY - 1)
    before = row.tokens[0]
    serve(pool, model, (part(2, 3, "code"),), draw)
    assert row.tokens[0] == pytest.approx(before + 3, abs=0.01)
    pool.close()


def test_the_longest_parts_are_looked_at_and_equal_ones_take_turns():
    rows = StepRows(1, 8, 2**20)
    parts = tuple(part(at, 1 + (at == 20), "code") for at in range(24))
    seen = set()
    for first in range(0, 24, 8):
        rows.begin(parts, first)
        rows.note(0, np.array([25, 0, 0, 0, 0, 0, 0, 0]), np.arange(25))
        taken = {part.sequence_id: counts.sum() for part, counts in rows.take()}
        assert taken[20] == 2
        assert len(taken) == MOST_SEQUENCES
        assert sum(taken.values()) == MOST_SEQUENCES + 1
        seen |= set(taken)
    assert seen == set(range(24))


def test_a_step_that_broke_off_leaves_nothing_for_the_next():
    rows = StepRows(1, 8, 2**20)
    for step in range(2):
        rows.begin((part(step, 2, "code"),), 0)
        rows.note(0, np.array([1, 1, 0, 0, 0, 0, 0, 0]), np.arange(2))
    assert [counts.sum() for _, counts in rows.take()] == [2]


def test_what_labels_let_expect_reaches_the_popularity_predictor(index):
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 8), prefetch="on")
    teach(pool, model)
    forecaster = pool.read_ahead.prefetcher.forecaster
    pool.begin_step((part(900, 3, "code"), part(901, 1, "law")))
    scores = forecaster._scores(4, 1, None)
    assert top(scores, 3) == set(HOME["code"])
    assert scores[list(HOME["law"])].sum() == pytest.approx(
        scores[list(HOME["code"])].sum() / 3, rel=0.3
    )
    pool.end_step()
    pool.begin_step((part(902, 1),))
    assert forecaster._rates is None
    pool.end_step()
    pool.close()


def test_the_summary_knows_what_domains_would_hit(index):
    pool, model = open_pool(index, expert_memory=slots_bytes(index, 6))
    empty = pool.routing_summary()
    assert (empty.hit_rate, empty.hit_rate_by_domain, empty.miss_s) == (0.0, {}, 0.0)
    teach(pool, model)
    everything = [(layer, e) for layer in range(2) for e in range(16)]
    pool.evict(everything)
    pool.preload([(layer, e) for layer in range(2) for e in HOME["code"]])
    pool.settle()
    summary = pool.routing_summary()
    assert summary.hit_rate_by_domain["code"] > 0.8
    assert summary.hit_rate_by_domain["law"] < 0.2
    assert 0.2 < summary.hit_rate < 0.7
    assert summary.miss_s > 0
    pool.close()


def test_where_all_are_here_every_domain_hits(index):
    pool, model = open_pool(index)
    teach(pool, model)
    pool.preload([(layer, e) for layer in range(2) for e in range(16)])
    pool.settle()
    summary = pool.routing_summary()
    assert summary.hit_rate == pytest.approx(1.0)
    assert summary.hit_rate_by_domain == pytest.approx({"code": 1.0, "law": 1.0})
    pool.close()


def test_signatures_are_kept(index):
    pool, model = open_pool(index)
    assert pool.signature("code") is None
    teach(pool, model)
    first = pool.signature("code", "", (1, 2), "other")
    assert first.shape == (2, 16)
    assert first.dtype == np.float32
    assert pool.signature("code", "", (5,), "other") is first
    assert top(pool.signature("law")[0], 3) == set(HOME["law"])
    pool.close()


def test_a_new_replica_knows_the_domains_of_earlier_runs(index):
    pool, model = open_pool(index)
    teach(pool, model)
    pool.close()
    pool, _ = open_pool(index, expert_memory=slots_bytes(index, 6))
    assert top(pool.signature("code")[0], 3) == set(HOME["code"])
    assert set(pool.routing_summary().hit_rate_by_domain) == {"code", "law"}
    pool.close()


def test_m5_replicas_take_over_what_others_add_and_never_see_a_half_file(index):
    """moe-l2 0.8.1: the domain table swapped twice under load."""
    now = [0.0]
    writer, model = open_pool(index, clock=lambda: now[0])
    reader, reading = open_pool(index, clock=lambda: now[0])
    assert reader.signature("code") is None
    for turn in range(2):
        teach(writer, model, steps=4)
        now[0] += 61.0
        draw = np.random.default_rng(turn)
        serve(writer, model, (part(1000 + turn, 4, "law"),), draw)
        serve(reader, reading, (part(1000, 3),), draw)  # its own turn to save
        code, law = (reader.expectations.popularity.of_domain(name) for name in ("code", "law"))
        for layer in range(2):
            assert top(code[layer], 3) == set(HOME["code"])
            assert top(law[layer], 3) == set(HOME["law"])
    for pool in (writer, reader):
        pool.close()


def hinted_pool(index, steps=20, **settings):
    """A pool full of law's experts that knows code's."""
    options = {"expert_memory": slots_bytes(index, 5), "hints": "on", **settings}
    pool, model = open_pool(index, **options)
    teach(pool, model, steps)
    draw = np.random.default_rng(5)
    for step in range(80):
        serve(pool, model, (part(5000, 1, "law", start=step + 1),), draw)
    return pool, model


def resident(pool, layer):
    return set(np.flatnonzero(pool.residency.states.state[layer] == State.RESIDENT).tolist())


def test_a_hint_brings_what_its_domain_uses_and_spares_what_is_worth_more(index, monkeypatch):
    monkeypatch.setattr(preload, "SLOTS_A_SECOND", 10.0)
    pool, model = hinted_pool(index)
    before = resident(pool, 0)
    assert not set(HOME["code"]) <= before
    pool.hint("code", tenant="t")
    pool.settle()
    for layer in range(2):
        assert len(set(HOME["code"]) & resident(pool, layer)) >= 2
        assert len(set(HOME["law"]) & resident(pool, layer)) >= 2, "law is being asked for"
    pool.check_invariants()
    stats = serve(pool, model, (part(6000, 12, "code"),), np.random.default_rng(1))
    assert stats.hints.received == 1
    assert stats.hints.begun == stats.hints.useful + stats.hints.wasted > 0
    assert stats.hints.useful >= 1
    pool.close()


def test_hints_of_what_nobody_knows_read_nothing(index):
    pool, _ = hinted_pool(index)
    for domain, session in (("poems", ""), ("", ""), ("", "no such chat")):
        pool.hint(domain, session, "t", (1, 2))
    assert not pool.under_way
    pool.close()
    whole, model = open_pool(index, hints="on")
    teach(whole, model)
    whole.hint("code")
    assert not whole.under_way
    whole.close()


def test_where_no_label_is_known_a_prompt_that_begins_alike_is_a_hint(index, monkeypatch):
    monkeypatch.setattr(preload, "SLOTS_A_SECOND", 10.0)
    pool, model = hinted_pool(index, prefetch="on")
    draw = np.random.default_rng(0)
    for number in range(4):
        begun = msgspec.structs.replace(part(8000 + number, 5, "code"), token_ids=(7, 8, 9, 1, 1))
        serve(pool, model, (msgspec.structs.replace(begun, domain=""),), draw)
    pool.settle()
    assert top(pool.signature("", "", (7, 8, 9))[0], 2) == set(HOME[""])
    pool.evict([(layer, e) for layer in range(2) for e in range(16)])
    pool.hint("", "", "t", (7, 8, 9))
    pool.settle()
    assert set(HOME[""]) <= resident(pool, 0)
    before = resident(pool, 0)
    pool.hint("", "", "t", (300, 301))
    assert resident(pool, 0) == before
    pool.close()


@pytest.mark.parametrize("setting", ["off", "on"])
def test_the_setting_counts(index, setting, monkeypatch):
    monkeypatch.setattr(preload, "SLOTS_A_SECOND", 10.0)
    pool, _ = hinted_pool(index, hints=setting)
    pool.hint("code", tenant="t")
    assert bool(pool.under_way) == (setting == "on")
    pool.settle()
    pool.close()


def test_a_second_and_a_tenant_have_their_bounds(index, monkeypatch):
    monkeypatch.setattr(preload, "SLOTS_A_SECOND", 0.4)
    now = [0.0]
    pool, _ = hinted_pool(index, clock=lambda: now[0])
    pool.evict([(layer, e) for layer in range(2) for e in range(16)])

    def begun(tenant, domain):
        before = pool.expectations.preloader._stats.begun
        pool.hint(domain, tenant=tenant)
        pool.settle()
        return pool.expectations.preloader._stats.begun - before

    assert begun("loud", "code") == 2, "of 10 slots, four may be filled, by it two"
    assert begun("loud", "law") == 0
    assert begun("quiet", "law") == 2
    assert begun("third", "code") == 0
    now[0] = 1.0
    assert begun("loud", "code") == 2
    pool.close()


def test_a_wrong_guess_is_dropped_with_what_was_to_be_read_for_it(index, monkeypatch):
    monkeypatch.setattr(preload, "SLOTS_A_SECOND", 10.0)
    pool, model = hinted_pool(index, steps=50, read_threads=1)
    pool.evict([(layer, e) for layer in range(2) for e in range(16)])
    pool.hint("code", tenant="liar")
    assert pool.under_way
    draw = np.random.default_rng(0)
    monkeypatch.setitem(HOME, "code", HOME["law"])  # a text of law that is called code
    stats = [serve(pool, model, (part(7000, 40, "code", tenant="liar"),), draw) for _ in range(3)]
    assert sum(s.hints.wrong_labels for s in stats) == 1
    assert sum(s.hints.dropped for s in stats) > 0
    assert pool.expectations.preloader._open == [{}, {}]
    pool.settle()
    pool.check_invariants()
    pool.close()


def test_hints_stand_down_where_they_do_not_pay_and_try_again():
    payoff = preload.HintPayoff()
    assert payoff.state == "probing"
    for _ in range(preload.PROBE_EXPERTS):
        payoff.ended(0)
    assert payoff.state == "off"
    followed = [payoff.hinted() for _ in range(preload.FIRST_REST_HINTS)]
    assert followed == [False] * (preload.FIRST_REST_HINTS - 1) + [True]
    for _ in range(preload.PROBE_EXPERTS):
        payoff.ended(1)
    assert payoff.state == "on"
    for _ in range(preload.PROBE_EXPERTS):
        payoff.ended(1)
        payoff.regretted()
    assert payoff.state == "probing", "who made room was asked for sooner each time"
    always = preload.HintPayoff(always=True)
    for _ in range(3 * preload.PROBE_EXPERTS):
        always.ended(0)
    assert always.state == "on"


def test_nothing_is_looked_at_without_labels(index):
    pool, model = open_pool(index)
    serve(pool, model, (part(1, 5), part(2, 1)), np.random.default_rng(0))
    assert not pool.expectations.gathers
    assert pool.expectations.popularity.domains == []
    assert pool.expectations._rows.nbytes == 0
    pool.close()


def test_no_memory_no_labels(index, monkeypatch):
    monkeypatch.setattr(expectations, "LEARN_EVERY", 1)
    pool, model = open_pool(index, popularity_memory=0)
    teach(pool, model)
    assert pool.expectations.popularity.domains == []
    assert pool.signature("code") is pool.signature("law")
    pool.close()
