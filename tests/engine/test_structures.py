"""Structured answers of the demo model: valid, ended in time, and nobody else's business."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from core.errors import OverloadedError, RequestError
from core.request import Request, SamplingParams, Structure
from core.step import SequenceOutput
from engine import grammar_cache, grammar_process
from engine.engine import Engine
from engine.grammar_process import GrammarProcess
from engine.json_schema import enforceable
from engine.mask_lanes import Look, MaskLanes
from engine.structure_matcher import MatcherFactory, StructureMatcher
from engine.vocabulary import Vocabulary
from tests.engine.schema_samples import PUBLIC, random_schema

DEMO = Path(__file__).resolve().parents[2] / "demo_model"
SETTINGS = {"max_sequences": 32, "context_tokens": 256, "kv_memory": "64MiB"}
SLOW_COMPILE = Structure(
    "json_schema", json.dumps({"type": "string", "pattern": "^.{0,2000}x.{0,2000}$"})
)
SLOW_MASK = Structure("regex", "((((a{0,50}){0,50}){0,50}){0,50}){0,50}")
VOCABULARY = Vocabulary.open(DEMO, 4096)
TOKEN_OF = {data: token for token, data in enumerate(VOCABULARY.token_bytes)}
END = 2


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Whoever runs the tests may be busy: what is judged here is processor time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(grammar_process, "_PATIENCE", 60.0)
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    opened = Engine.open(DEMO, engine=SETTINGS)
    yield opened
    opened.check_invariants()
    opened.close()


def request(name: str, structure: Structure | None, n: int = 1, **params: Any) -> Request:
    chosen = {"max_tokens": 48, "temperature": 0.8, "top_k": 40, "seed": len(name), **params}
    prompt = (1, *b"user says yes"[:8], END)
    return Request(
        request_id=name,
        prompt_ids=prompt,
        params=SamplingParams(structure=structure, **chosen),
        n=n,
    )


class Answers:
    """Outputs by (request id, index), joined."""

    def __init__(self) -> None:
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.last: dict[tuple[str, int], SequenceOutput] = {}
        self.preemptions = 0

    def take(self, engine: Engine) -> None:
        result = engine.step()
        self.preemptions += result.stats.preemptions
        for output in result.outputs:
            key = (output.request_id, output.index)
            self.ids.setdefault(key, []).extend(output.token_ids)
            self.last[key] = output

    def text(self, name: str, index: int = 0) -> str:
        ids = self.ids[name, index]
        return b"".join(VOCABULARY.token_bytes[i] for i in ids).decode(errors="replace")

    def reason(self, name: str, index: int = 0) -> str | None:
        return self.last[name, index].finish_reason


def run(engine: Engine, *requests: Request) -> Answers:
    answers = Answers()
    for one in requests:
        engine.add(one)
    while engine.has_work():
        answers.take(engine)
    return answers


def one(engine: Engine, structure: Structure | None, **params: Any) -> tuple[str, str | None]:
    answers = run(engine, request("one", structure, **params))
    return answers.text("one"), answers.reason("one")


def accepted_schemas(count: int) -> list[dict[str, Any]]:
    chance = random.Random(200)
    found = list(PUBLIC)
    while len(found) < count:
        schema = random_schema(chance)
        try:
            enforceable(schema)
        except RequestError:
            continue
        found.append(schema)
    return found


def test_every_finished_answer_to_200_schemas_is_valid(engine: Engine) -> None:
    schemas = accepted_schemas(200)
    requests = [
        request(str(i), Structure("json_schema", json.dumps(schema)), seed=i, max_tokens=100)
        for i, schema in enumerate(schemas)
    ]
    answers = Answers()
    while requests or engine.has_work():
        # More at once would be told to come back later.
        while requests and engine.gauges().waiting < grammar_cache.MAX_WAITING:
            engine.add(requests.pop())
        answers.take(engine)
    finished = 0
    for i, schema in enumerate(schemas):
        assert answers.reason(str(i)) in ("stop", "length"), answers.last[str(i), 0]
        if answers.reason(str(i)) == "stop":
            finished += 1
            value = json.loads(answers.text(str(i)))
            jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    assert len(schemas) == 200
    assert finished >= 150, finished


@pytest.mark.parametrize(
    ("structure", "right"),
    [
        (Structure("regex", "[0-9]{3}-[a-z]{2}"), r"[0-9]{3}-[a-z]{2}"),
        (Structure("choice", '["red", "green", "gr\\"een"]'), 'red|green|gr"een'),
        (Structure("choice", '["世界"]'), "世界"),
        (Structure("ebnf", 'root ::= "é" [a-c] | "ü"'), "é[a-c]|ü"),
        (Structure("regex", ""), ""),
    ],
)
def test_an_answer_has_its_form_and_ends_with_it(
    engine: Engine, structure: Structure, right: str
) -> None:
    text, reason = one(engine, structure)
    assert re.fullmatch(right, text) and reason == "stop"


def test_a_json_object_is_one(engine: Engine) -> None:
    end = ((TOKEN_OF[b"}"], 30.0), (TOKEN_OF[b'"'], 10.0))
    text, reason = one(engine, Structure("json_object"), logit_bias=end, max_tokens=200)
    assert reason == "stop" and isinstance(json.loads(text), dict)


def test_an_end_comes_only_where_the_structure_may_end(engine: Engine) -> None:
    eager = {"logit_bias": ((END, 100.0),), "temperature": 0.0}
    text, reason = one(engine, Structure("regex", "[0-9]{3,9}"), **eager)
    assert len(text) == 3 and reason == "stop"
    stop = TOKEN_OF[b"7"]
    wanted = {"logit_bias": ((stop, 100.0),), "stop_token_ids": (stop,), "ignore_eos": True}
    text, reason = one(engine, Structure("regex", "[0-9]{2,9}"), **wanted)
    assert re.fullmatch("[0-689]{2}", text) and reason == "stop"


def test_the_least_number_of_tokens_holds_where_the_structure_lets_it(engine: Engine) -> None:
    eager = ((END, 100.0),)
    answers = run(
        engine, request("r", Structure("regex", "[0-9]*"), min_tokens=9, logit_bias=eager)
    )
    assert len(answers.ids["r", 0]) == 9 and answers.reason("r") == "stop"
    text, reason = one(engine, Structure("choice", '["yes"]'), min_tokens=20)
    assert (text, reason) == ("yes", "stop")


def test_without_an_end_token_a_structure_ends_when_it_is_complete(engine: Engine) -> None:
    assert one(engine, Structure("choice", '["yes"]'), ignore_eos=True) == ("yes", "stop")
    text, reason = one(engine, Structure("regex", "[0-9]+"), ignore_eos=True, max_tokens=20)
    assert text.isdigit() and reason == "length"


def test_neither_bias_nor_penalties_break_the_structure(engine: Engine) -> None:
    outside = tuple((TOKEN_OF[bytes([byte])], 100.0) for byte in b"abc{")
    wild = {
        "logit_bias": outside,
        "repetition_penalty": 3.0,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "temperature": 2.0,
        "top_k": 0,
    }
    text, reason = one(engine, Structure("regex", "[0-9]{12}"), **wild)
    assert re.fullmatch("[0-9]{12}", text) and reason == "stop"


def test_each_of_n_sequences_follows_the_structure_on_its_own(engine: Engine) -> None:
    asked = request("n", Structure("regex", "[a-z]{8}"), n=4, temperature=1.5, logprobs=2)
    answers = run(engine, asked)
    texts = [answers.text("n", i) for i in range(4)]
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts) and len(set(texts)) > 1
    assert all(answers.reason("n", i) == "stop" for i in range(4))


def test_special_tokens_are_no_text_and_come_by_their_id_only(engine: Engine) -> None:
    eager = tuple((token, 50.0) for token in VOCABULARY.special)
    answers = run(engine, request("t", Structure("regex", "[\\s\\S]{6}"), logit_bias=eager))
    assert not VOCABULARY.special.keys() & set(answers.ids["t", 0])
    mark = {"type": "token", "token": 1}
    word = {"type": "const_string", "value": "hi"}
    thought = {"type": "any_text", "excludes": ["<|im_start|>"]}
    tag = {"type": "sequence", "elements": [thought, mark, word]}
    form = Structure("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    answers = run(engine, request("t", form, logit_bias=((1, 20.0),)))
    assert answers.ids["t", 0].count(1) == 1
    assert answers.text("t").endswith("\ufffd1hi") and answers.reason("t") == "stop"


def test_a_schema_in_a_structural_tag_is_checked_like_one_alone(engine: Engine) -> None:
    schema = {"type": "json_schema", "json_schema": {"not": {}}}
    tag = json.dumps({"type": "structural_tag", "format": schema})
    answers = run(engine, request("t", Structure("structural_tag", tag)))
    assert answers.last["t", 0].error_type == "RequestError"
    assert "schema.not" in (answers.last["t", 0].error or "")


def test_preempted_sequences_go_on_in_their_structure() -> None:
    tight = {**SETTINGS, "max_sequences": 4, "kv_memory": 70_000, "kv_block_tokens": 4}
    small = Engine.open(DEMO, engine=tight)
    try:
        form = Structure("regex", "([a-z]{3}-){10}")
        requests = [request(f"p{i}", form, seed=i, max_tokens=60) for i in range(4)]
        answers = run(small, *requests)
        assert answers.preemptions > 0
        for asked in requests:
            assert answers.reason(asked.request_id) == "stop"
            assert re.fullmatch("([a-z]{3}-){10}", answers.text(asked.request_id))
        small.check_invariants()
    finally:
        small.close()


def test_the_same_seed_gives_the_same_structured_answer(engine: Engine) -> None:
    form = Structure("regex", "[a-z ]{20}")
    assert one(engine, form, seed=5) == one(engine, form, seed=5)


# Compiling


@pytest.fixture(scope="module")
def strict() -> Iterator[Engine]:
    opened = Engine.open(
        DEMO, engine={**SETTINGS, "structure_compile_s": 1.5, "structure_token_s": 1.0}
    )
    # Its compilers are up before times are looked at.
    run(opened, request("warm", Structure("regex", "a")), request("up", Structure("regex", "b")))
    yield opened
    opened.check_invariants()
    opened.close()


def compilers_s(engine: Engine) -> float:
    """Processor time of an engine's compilers."""
    pids = [process.pid for process in engine._structures.cache._processes]
    return sum(grammar_process._used_s(pid) for pid in pids if pid is not None)


def test_a_structure_that_takes_too_long_is_refused_and_holds_nobody_up(strict: Engine) -> None:
    strict.add(request("bad", SLOW_COMPILE))
    strict.add(request("other", None, max_tokens=5, ignore_eos=True))
    answers = Answers()
    while not answers.last:
        answers.take(strict)
        assert strict.gauges().running <= 1
    while answers.reason("other") is None:
        answers.take(strict)
    assert ("bad", 0) not in answers.last, "the others were to go on meanwhile"
    while strict.has_work():
        answers.take(strict)
    bad = answers.last["bad", 0]
    assert bad.error_type == "RequestError" and "within 1.5 s" in (bad.error or "")
    # It costs its time once, and the compiler works again.
    before_s = compilers_s(strict)
    assert run(strict, request("again", SLOW_COMPILE)).last["again", 0].error == bad.error
    assert compilers_s(strict) - before_s < 0.5
    assert one(strict, Structure("choice", '["well"]')) == ("well", "stop")


def test_a_request_can_be_cancelled_while_its_structure_is_compiled(strict: Engine) -> None:
    slow = Structure(SLOW_COMPILE.kind, SLOW_COMPILE.text.replace("x", "y"))
    strict.add(request("gone", slow, n=2))
    strict.step()
    strict.check_invariants()
    strict.cancel("gone")
    strict.check_invariants()
    answers = Answers()
    while strict.has_work():
        answers.take(strict)
    assert answers.reason("gone", 0) == answers.reason("gone", 1) == "cancelled"
    assert strict.gauges().waiting == 0


def test_a_mask_that_takes_too_long_fails_its_request_alone(strict: Engine) -> None:
    more = {"ignore_eos": True, "min_tokens": 40, "logit_bias": ((TOKEN_OF[b"a"], 100.0),)}
    strict.add(request("slow", SLOW_MASK, **more))
    strict.add(request("plain", None, max_tokens=40, ignore_eos=True))
    strict.add(request("quick", Structure("regex", "[0-9]{30}")))
    answers = Answers()
    looks: list[Look] = []
    """That of the slow one, once for each step that goes on meanwhile."""
    while strict.has_work():
        answers.take(strict)
        bound = strict._structures._bound.values()
        looks += [b.look for b in bound if b.look and b.sequence.request.request_id == "slow"]
    slow = answers.last["slow", 0]
    assert slow.error_type == "RequestError" and "a token" in (slow.error or "")
    assert answers.reason("plain") == "length" and answers.reason("quick") == "stop"
    assert max(Counter(map(id, looks)).values()) > 5, "no step was to wait for all of a look"
    assert one(strict, Structure("regex", "[0-9]{3}"))[1] == "stop"


def test_a_compiler_that_dies_is_replaced(strict: Engine) -> None:
    for process in strict._structures.cache._processes:
        if process._process is not None:
            process._process.kill()
    lasts = [run(strict, request("x", Structure("regex", "x{2}"))).last["x", 0] for _ in range(3)]
    assert {last.error_type for last in lasts} <= {None, "OverloadedError"}
    assert lasts[-1].finish_reason == "stop", "no verdict was to be kept"


def test_a_compiler_that_is_killed_while_it_starts_is_nobodys_fault() -> None:
    process = GrammarProcess(DEMO, 4096, 0.3)
    good = Structure("regex", "a")
    try:
        process.start()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(OverloadedError):
            process.judge(good)
        assert process.judge(good).kind == "regex"
    finally:
        process.close()


def test_only_what_a_structure_does_to_its_compiler_is_its_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = GrammarProcess(DEMO, 4096, 0.3)
    good = Structure("regex", "a")
    try:
        for number, error in (
            (signal.SIGSTOP, OverloadedError),
            (signal.SIGKILL, OverloadedError),
            (signal.SIGSEGV, RequestError),
            (signal.SIGXCPU, RequestError),
        ):
            assert process.judge(good).kind == "regex"
            assert process.pid is not None
            os.kill(process.pid, number)
            with monkeypatch.context() as patched, pytest.raises(error):
                patched.setattr(grammar_process, "_PATIENCE", 4.0)
                process.judge(good)
    finally:
        process.close()


def test_looks_of_requests_that_left_give_their_threads_back(
    monkeypatch: pytest.MonkeyPatch, strict: Engine
) -> None:
    form = Structure("regex", "[0-9]{3}")
    assert one(strict, form)[1] == "stop"
    gate, began, plain = threading.Event(), [], StructureMatcher.look

    def look(matcher: StructureMatcher) -> None:
        began.append(matcher)
        if len(began) <= 2:
            gate.wait(30)
        plain(matcher)

    monkeypatch.setattr(StructureMatcher, "look", look)
    lanes = strict._structures._lanes
    before = lanes.stuck
    try:
        for name in ("l0", "l1", "late"):
            strict.add(request(name, form))
        while len(began) < 2:
            strict.step()
        for name in ("l0", "l1", "late"):
            strict.cancel(name)
        assert one(strict, form)[1] == "stop"
        assert lanes.stuck == before + 2
        assert len({id(matcher) for matcher in began}) == 3, "the third was not to begin"
    finally:
        gate.set()
    deadline = time.monotonic() + 10
    while lanes.stuck > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert one(strict, form)[1] == "stop" and not strict._structures._abandoned


class _NoMatcher:
    def look(self) -> None:
        pass


def test_a_look_is_done_or_given_up_and_never_both() -> None:
    given_up: queue.SimpleQueue[bool] = queue.SimpleQueue()
    lanes = MaskLanes(lambda look: given_up.put(lanes.give_up(look, slow=False)))
    matcher: Any = _NoMatcher()
    for i in range(20):
        lanes.submit(Look(i, matcher, None), slow=False)
        assert not given_up.get(timeout=10)
    assert lanes.stuck == 0
    lanes.close()


def test_a_matcher_that_cannot_be_made_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, strict: Engine
) -> None:
    form = Structure("regex", "[0-9]{3}")
    assert one(strict, form)[1] == "stop"

    def matcher(*_: Any) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(MatcherFactory, "matcher", matcher)
        plain = request("plain", None, max_tokens=4, ignore_eos=True)
        answers = run(strict, request("bad", form), plain)
    assert answers.last["bad", 0].error == "none left" and answers.reason("plain") == "length"
    assert one(strict, form)[1] == "stop"


def test_the_cache_is_bounded_by_count_and_bytes(
    monkeypatch: pytest.MonkeyPatch, strict: Engine
) -> None:
    cache = strict._structures.cache
    monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 3)
    for i in range(6):
        assert one(strict, Structure("choice", json.dumps([f"v{i}"]))) == (f"v{i}", "stop")
    assert len(cache) <= 3
    monkeypatch.setattr(cache, "_memory_bytes", 1)
    assert one(strict, Structure("choice", '["last"]')) == ("last", "stop")
    assert len(cache) == 1


def test_too_many_waiting_structures_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch, strict: Engine
) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_WAITING", 1)
    slow = Structure(SLOW_COMPILE.kind, SLOW_COMPILE.text.replace("x", "z"))
    answers = run(strict, request("a", slow), request("b", Structure("regex", "never")))
    assert answers.last["b", 0].error_type == "OverloadedError"


def test_a_model_without_a_tokenizer_refuses_structures(tmp_path: Path) -> None:
    for path in DEMO.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    bare = Engine.open(tmp_path, engine=SETTINGS)
    try:
        last = run(bare, request("r", Structure("json_object"))).last["r", 0]
        assert last.error_type == "RequestError" and "tokenizer.json" in (last.error or "")
    finally:
        bare.close()


def test_a_chat_without_a_server_takes_a_structure(engine: Engine) -> None:
    message = {"role": "user", "content": "Yes or no?"}
    form = Structure("choice", '["yes", "no"]')
    assert "".join(engine.chat([message], structure=form)) in ("yes", "no")


def test_without_structures_nothing_is_started(engine: Engine) -> None:
    plain = Engine.open(DEMO, engine=SETTINGS)
    try:
        run(plain, request("r", None, max_tokens=3))
        assert not plain._structures.cache._processes
        assert plain._structures.cache._factory is None
    finally:
        plain.close()
