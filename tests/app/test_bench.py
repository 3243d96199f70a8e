"""`coterie bench`: plain schedules, honest times, and a whole run against a server of ours."""

import asyncio
import csv
import itertools
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest
import typer

from app.commands.bench import bench
from app.load.arrivals import (
    Arrival,
    Lengths,
    TokenRange,
    closed_arrivals,
    open_arrivals,
)
from app.load.client import LoadClient, Target, first_model
from app.load.event_stream import EventParser
from app.load.prompts import PromptLine, write_prompt
from app.load.runner import LoadRunner
from app.load.sample import Sample
from app.load.server_processes import serving_roots
from app.load.summary import Objectives, percentile, summarise
from app.load.trace_file import read_trace, scaled
from core.errors import CoterieError, SettingsError
from deployments.settings import ServingSettings
from tests.app.test_cli import run  # noqa: F401  # a fixture
from tests.serving.local_server import MODEL, LocalServer
from tests.serving.tiny_model_folder import make_folder

LENGTHS = Lengths(TokenRange(60, 90), TokenRange(3, 6))
ENGINE = {"max_sequences": 8, "context_tokens": 4096, "kv_memory": 10_000}
ROW = [
    "clients",
    "rate",
    "tok_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "tpot_p50_ms",
    "tpot_p95_ms",
    "goodput",
    "errors",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def server(folder):
    with LocalServer(folder, ServingSettings(), ENGINE) as running:
        yield running


def target(url, **changes):
    fields = {"endpoint": "chat", "model": MODEL, "api_key": "", "timeout_s": 30.0}
    return Target(url, **{**fields, "ignore_eos": True, **changes})


# Schedules


def test_fixed_arrivals_are_evenly_spaced():
    made = open_arrivals(4.0, False, LENGTHS, 0, 5, None)
    assert [x.at_s for x in made] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    made = open_arrivals(10.0, True, LENGTHS, 3, 20_000, None)
    gaps = [later.at_s - sooner.at_s for sooner, later in itertools.pairwise(made)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.03)
    assert variance == pytest.approx(0.01, rel=0.06)


def test_a_seed_decides_everything_and_lengths_do_not_depend_on_the_rate():
    slow = open_arrivals(1.0, True, LENGTHS, 7, 50, None)
    assert slow == open_arrivals(1.0, True, LENGTHS, 7, 50, None)
    assert slow != open_arrivals(1.0, True, LENGTHS, 8, 50, None)
    fast = open_arrivals(9.0, True, LENGTHS, 7, 50, None)
    lengths = [(x.prompt_tokens, x.output_tokens) for x in slow]
    assert lengths == [(x.prompt_tokens, x.output_tokens) for x in fast]
    closed = closed_arrivals(LENGTHS, 7, 50)
    assert lengths == [(x.prompt_tokens, x.output_tokens) for x in closed]


def test_a_duration_ends_a_schedule_and_no_end_is_refused():
    assert len(open_arrivals(10.0, False, LENGTHS, 0, None, 2.0)) in (20, 21)
    assert len(open_arrivals(10.0, False, LENGTHS, 0, 3, 2.0)) == 3
    with pytest.raises(SettingsError, match="needs an end"):
        open_arrivals(10.0, False, LENGTHS, 0, None, None)


@pytest.mark.parametrize("text", ["0", "9-3", "x", "", "3-", "1.5"])
def test_wrong_lengths_name_the_flag(text):
    with pytest.raises(SettingsError, match="--prompt-tokens"):
        TokenRange.parse(text, "--prompt-tokens")


# Traces


def write_trace(path, *rows, head="arrival_s,prompt_tokens,output_tokens"):
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    return path


def test_a_trace_is_sorted_and_begins_at_zero(tmp_path):
    path = write_trace(tmp_path / "t.csv", "12.5,30,4", "10,20,3")
    assert read_trace(path) == [Arrival(0.0, 20, 3), Arrival(2.5, 30, 4)]


def test_columns_are_found_by_name_and_labels_are_not_read(tmp_path):
    head = "source,output_tokens,arrival_s,prompt_tokens"
    assert read_trace(write_trace(tmp_path / "t.csv", "x,3,0,20", head=head)) == [
        Arrival(0.0, 20, 3)
    ]


@pytest.mark.parametrize(
    ("rows", "head", "said"),
    [
        (["0,1,1"], "time,prompt_tokens,output_tokens", "lacks arrival_s"),
        (["0,1,1", "1,x,1"], "arrival_s,prompt_tokens,output_tokens", "t.csv:3"),
        (["0,1"], "arrival_s,prompt_tokens,output_tokens", "t.csv:2"),
        (["0,0,1"], "arrival_s,prompt_tokens,output_tokens", "at least one"),
        (["0,1.5,1"], "arrival_s,prompt_tokens,output_tokens", "at least one"),
        (["nan,1,1"], "arrival_s,prompt_tokens,output_tokens", "t.csv:2"),
        (["-1,1,1"], "arrival_s,prompt_tokens,output_tokens", "t.csv:2"),
        ([], "arrival_s,prompt_tokens,output_tokens", "found none"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_place(tmp_path, rows, head, said):
    with pytest.raises(SettingsError, match=said):
        read_trace(write_trace(tmp_path / "t.csv", *rows, head=head))


def test_a_trace_can_be_made_faster_shorter_and_smaller(tmp_path):
    rows = [f"{second},100,{second + 1}" for second in range(10)]
    recorded = read_trace(write_trace(tmp_path / "t.csv", *rows))
    assert scaled(recorded, 2.0, 0.1, None, 2.0) == [
        Arrival(second / 2, 10, 1) for second in range(4)
    ]
    assert scaled(recorded, 1.0, 1.0, 3, None) == recorded[:3]


@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set")
@pytest.mark.parametrize("name", ["azure2023_code", "azure2023_conv", "mooncake_conversation"])
def test_public_traces_are_read_whole(name):
    path = Path(os.environ["COTERIE_DATA"]) / "traces" / f"{name}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    read = read_trace(path)
    assert len(read) == len(rows)
    assert sum(x.output_tokens for x in read) == sum(int(row["output_tokens"]) for row in rows)
    times = [x.at_s for x in read]
    assert times[0] == 0.0 and times == sorted(times)


# Prompts and event streams


def test_equal_prompts_only_for_equal_seeds_and_numbers():
    texts = {write_prompt(40, seed, number) for seed in range(3) for number in range(30)}
    assert len(texts) == 90
    assert len({text[:24] for text in texts}) > 80, "no shared beginnings"
    assert write_prompt(40, 1, 2) == write_prompt(40, 1, 2)
    assert len(write_prompt(40, 0, 0).split()) == 40


def test_words_are_found_from_two_counts():
    line = PromptLine.through((8, 8 * 2 + 14), (256, 256 * 2 + 14))
    assert [line.words(tokens) for tokens in (1, 14, 20, 214)] == [1, 1, 3, 100]


def test_events_are_the_same_however_the_bytes_are_cut():
    whole = (
        b": a comment\r\n\r\nevent: x\r\ndata: one\r\n\r\ndata:two\ndata: lines\n\n"
        b"id: 3\n\ndata: \xe2\x82\xac \x85 \xc2\x85\n\ndata: [DONE]\n\ndata: cut"
    )
    expected = [b"one", b"two\nlines", b"\xe2\x82\xac \x85 \xc2\x85", b"[DONE]"]
    cuts = random.Random(0)
    for _ in range(300):
        parser, found, rest = EventParser(), [], whole
        while rest:
            size = cuts.randint(1, 9)
            found += parser.feed(rest[:size])
            rest = rest[size:]
        assert found == expected


# Figures


def sample(due_s, first_s, last_s, tokens, error=None):
    made = Sample(due_s, due_s, first_s, last_s, last_s, 10, tokens, error)
    made.sent_s = due_s + 0.001
    return made


def test_a_row_has_rates_latencies_goodput_and_errors():
    samples = [
        sample(0.0, 0.1, 1.1, 11),  # TTFT 100 ms, TPOT 100 ms
        sample(0.0, 0.9, 1.9, 11),  # too late to begin
        sample(0.5, 0.6, 4.0, 11),  # too slow afterwards
        sample(1.0, 1.2, 1.2, 1),  # one token has no TPOT
        sample(1.0, None, 1.0, 0, "503"),
        sample(1.0, None, 1.0, 0, "503"),
        sample(1.0, 1.1, 1.5, 7, "cut off"),
    ]
    row = summarise(samples, Objectives(200.0, 150.0), None, 2.0)
    assert list(row)[: len(ROW)] == ROW
    assert row["tok_s"] == round(34 / 4.0, 2), "failed answers are not counted"
    assert row["goodput"] == round(12 / 4.0, 2)
    assert row["errors"] == {"503": 2, "cut off": 1}
    assert (row["ttft_p50_ms"], row["ttft_p95_ms"]) == (100.0, 900.0)
    assert (row["tpot_p50_ms"], row["tpot_p95_ms"]) == (100.0, 340.0)
    assert (row["requests"], row["lag_p95_ms"]) == (7, 1.0)


def test_a_row_without_answers_has_no_latencies():
    row = summarise([sample(0.0, None, 0.1, 0, "503")], Objectives(1.0, 1.0), 1, None)
    assert row["ttft_p50_ms"] is None and row["tpot_p95_ms"] is None
    assert (row["tok_s"], row["goodput"]) == (0.0, 0.0)


def test_percentiles_are_values_that_were_seen():
    values = [float(x) for x in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 95, 100)] == [1.0, 50.0, 95.0, 100.0]
    assert percentile([], 50) is None


# The client


def ask(url, prompt="hello", tokens=4, **changes):
    async def one():
        async with LoadClient(target(url, **changes)) as client:
            return await client.ask(prompt, tokens, 0, time.monotonic())

    return asyncio.run(one())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_tokens_are_the_servers_count(server, endpoint):
    # The tokenizer merges "the": fewer tokens than letters, and several tokens may share a chunk.
    found = ask(server.url, "the the the", 9, endpoint=endpoint)
    assert found.ok, found.message
    assert found.output_tokens == 9
    assert found.due_s <= found.sent_s <= found.first_s <= found.last_s <= found.ended_s


def test_an_answer_that_ends_by_itself_is_shorter(server):
    assert ask(server.url, "abc", 50, ignore_eos=False).output_tokens <= 4


def test_a_refusal_is_an_error_with_its_status_and_message(server):
    found = ask(server.url, model="no-such")
    assert found.error == "404"
    assert "no-such" in found.message


def test_an_error_frame_within_a_stream_is_an_error(server):
    async def one():
        async with LoadClient(target(server.url)) as client:
            return await client.ask("abcdefgh", 8, 1003, time.monotonic())

    found = asyncio.run(one())
    assert found.error == "stream"
    assert "NaN" in found.message


def test_nobody_there_and_a_slow_answer_are_errors(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = ask(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert found.error == "connection"

    async def slow():
        async with LoadClient(target(server.url, timeout_s=0.3)) as client:
            return await client.ask("abc", 1000, 2050, time.monotonic())

    assert asyncio.run(slow()).error == "timeout"


@pytest.fixture
def rude_server():
    """Answers each connection with the bytes it is given, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    said = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                # Read whole: closing with bytes unread would reset the connection.
                seen = b""
                while not seen.endswith(b"}" if seen.startswith(b"POST") else b"\r\n\r\n"):
                    seen += connection.recv(65536)
                connection.sendall(said[0])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", said
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (STREAM + b"content-length: 999\r\n\r\ndata: {}\n\n", "cut off"),
        (STREAM + b"\r\ndata: {}\n\n", "cut off"),
        (STREAM + b"\r\ndata: {}\n\ndata: [DONE]\n\n", "no usage"),
        (STREAM + b"\r\ndata: <html>\n\ndata: [DONE]\n\n", "stream"),
        (b"HTTP/1.1 429 x\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nnope", "429"),
        (b"HTTP/1.1 503 x\r\nretry-after: soon\r\ncontent-length: 0\r\n\r\n", "503"),
    ],
)
def test_strange_answers_are_errors_and_nothing_is_raised(rude_server, answer, error):
    url, said = rude_server
    said.append(answer)
    found = ask(url)
    assert found.error == error
    assert found.retry_after_s == (7.0 if error == "429" else None)


def test_a_service_without_models_is_named(rude_server):
    url, said = rude_server
    said.append(b"HTTP/1.1 401 x\r\ncontent-length: 0\r\n\r\n")
    with pytest.raises(CoterieError, match="COTERIE_API_KEY"):
        first_model(url, "")
    said[0] = b"HTTP/1.1 200 x\r\ncontent-length: 2\r\n\r\n{}"
    with pytest.raises(CoterieError, match="--model"):
        first_model(url, "")


# Loops


class SlowClient:
    """Takes a fixed time for each request, one after the other, like a saturated server."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.lock = asyncio.Lock()
        self.target = target("http://slow")
        self.at_once = self.most_at_once = 0

    async def ask(self, prompt, output_tokens, seed, due_s):
        found = Sample(due_s, sent_s=time.monotonic(), prompt_tokens=1, output_tokens=1)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        async with self.lock:
            await asyncio.sleep(self.seconds)
        self.at_once -= 1
        found.first_s = found.last_s = found.ended_s = time.monotonic()
        return found


def test_an_open_loop_counts_from_the_scheduled_arrival():
    """A server of half the offered rate: waiting grows, and no request is sent later for it."""

    async def load():
        client = SlowClient(0.04)
        arrivals = [Arrival(number * 0.02, 1, 1) for number in range(20)]
        return client, await LoadRunner(client, 0).open_loop(arrivals)

    client, found = asyncio.run(load())
    gaps = [later.due_s - sooner.due_s for sooner, later in itertools.pairwise(found)]
    assert gaps == pytest.approx([0.02] * 19), "due times are the schedule's own"
    assert max(x.sent_s - x.due_s for x in found) < 0.2
    assert found[-1].ttft_s > 5 * found[0].ttft_s
    assert client.most_at_once > 5


def test_a_late_sender_does_not_hide_the_wait():
    """The loop is blocked for 0.3 s: what was due meanwhile is sent late, timed from when due."""

    async def load():
        asyncio.get_running_loop().call_later(0.1, time.sleep, 0.3)
        arrivals = [Arrival(number * 0.05, 1, 1) for number in range(6)]
        return await LoadRunner(SlowClient(0.0), 0).open_loop(arrivals)

    found = asyncio.run(load())
    assert max(x.ttft_s for x in found) > 0.15
    assert max(x.sent_s - x.due_s for x in found) > 0.15


def test_a_closed_loop_has_as_many_requests_at_once_as_clients():
    async def load(requests, duration_s):
        client = SlowClient(0.005)
        arrivals = closed_arrivals(LENGTHS, 0, requests)
        return client, await LoadRunner(client, 0).closed_loop(3, arrivals, duration_s)

    client, found = asyncio.run(load(10, None))
    assert (len(found), client.most_at_once) == (10, 3)
    _, found = asyncio.run(load(None, 0.1))
    assert 3 <= len(found) <= 25


# The command


def run_json(server, capsys, *arguments, **options):
    bench(server.url, *arguments, as_json=True, warm_up=1, **options)
    return json.loads(capsys.readouterr().out)


def test_a_closed_loop_over_http(server, capsys):
    found = run_json(
        server, capsys, clients="1,4", requests=12, prompt_tokens="60-90", output_tokens="3-6"
    )
    assert found["benchmark"] == "bench"
    assert {"machine", "versions", "quiet"} < set(found)
    assert [row["clients"] for row in found["rows"]] == [1, 4]
    for row in found["rows"]:
        assert list(row)[: len(ROW)] == ROW
        assert row["rate"] is None
        assert (row["errors"], row["requests"]) == ({}, 12)
        assert 60 <= row["prompt_tokens"] <= 90, "words are chosen by the server's own count"
        assert 3 <= row["output_tokens"] <= 6
        assert 0 < row["goodput"] <= row["tok_s"]


def test_open_loops_over_http(server, capsys):
    common = {"requests": 10, "prompt_tokens": "40", "output_tokens": "4"}
    for arrivals in ("poisson", "fixed"):
        found = run_json(server, capsys, rate="50,100", arrivals=arrivals, **common)
        assert [row["rate"] for row in found["rows"]] == [50.0, 100.0]
        assert all(row["requests"] == 10 and not row["errors"] for row in found["rows"])


def test_a_trace_over_http(server, capsys, tmp_path):
    path = write_trace(tmp_path / "t.csv", "5,400,20", "5.2,800,40", "5.3,200,30")
    found = run_json(server, capsys, trace=path, speed=2.0, token_scale=0.1)
    (row,) = found["rows"]
    assert (row["clients"], row["rate"], row["requests"]) == (None, None, 3)
    assert row["output_tokens"] == 3.0


def test_objectives_decide_the_goodput(server, capsys):
    common = {"requests": 4, "output_tokens": "4"}
    (row,) = run_json(server, capsys, ttft_ms=0.001, **common)["rows"]
    assert row["goodput"] == 0.0 < row["tok_s"]
    (row,) = run_json(server, capsys, ttft_ms=60_000, tpot_ms=60_000, **common)["rows"]
    assert row["goodput"] == row["tok_s"]


def test_a_full_queue_is_counted_and_printed(folder, capsys):
    engine = {**ENGINE, "max_sequences": 1}
    serving = ServingSettings(max_queued_requests=1, max_ongoing_requests=64)
    with LocalServer(folder, serving, engine) as small:
        bench(small.url, rate="400", arrivals="fixed", requests=60, output_tokens="300", warm_up=0)
    printed = capsys.readouterr().out
    assert " x 503: " in printed


def test_nothing_answered_is_exit_code_1(folder, capsys):
    # The calibrating requests are short enough; those of the load are refused.
    engine = {**ENGINE, "context_tokens": 400}
    with LocalServer(folder, ServingSettings(), engine) as small:
        with pytest.raises(typer.Exit) as ended:
            bench(small.url, requests=2, prompt_tokens="40", output_tokens="390", warm_up=0)
        assert ended.value.exit_code == 1
    assert "400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clients", "0"], "--clients"),
        (["--clients", "1,x"], "--clients"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--clients", "1", "--rate", "1"], "one of"),
        (["--rate", "1", "--arrivals", "uniform"], "poisson or fixed"),
        (["--endpoint", "embeddings"], "chat or completions"),
        (["--trace", "no-such.csv"], "no-such.csv"),
        (["--prompt-tokens", "9-3"], "--prompt-tokens"),
        (["--duration-s", "0"], "--duration-s"),
        (["--requests", "0"], "--requests"),
    ],
)
def test_wrong_usage_is_one_line(run, arguments, said):  # noqa: F811
    code, out, err = run("bench", "http://127.0.0.1:9", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert said in err


def test_nobody_there_is_one_line(run):  # noqa: F811
    code, _, err = run("bench", "http://127.0.0.1:9")
    assert code == 1
    assert "no answer from http://127.0.0.1:9" in err


def test_the_key_comes_from_the_environment(server, capsys, monkeypatch):
    monkeypatch.setenv("COTERIE_API_KEY", "secret")
    seen = []
    real = LoadClient.__aenter__

    async def spy(client):
        entered = await real(client)
        seen.append(client._http.headers["authorization"])
        return entered

    monkeypatch.setattr(LoadClient, "__aenter__", spy)
    run_json(server, capsys, requests=1)
    assert seen == ["Bearer secret"]


def test_the_server_of_this_machine_is_not_another_process(server):
    # It listens in this very process, which is ours anyway.
    assert serving_roots(server.url) == ()
    assert serving_roots("http://example.org") == ()
