"""`coterie profile` on the bundled model: every figure from what really ran."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from app import cli
from app.profile_groups import PERTURBED_ONE_IN, groups, perturbed
from expert_pool.routing_trace import RoutingTrace
from tests.app.test_cli import DEMO_MODEL


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """(JSON, trace, page) of one run with own prompts and bundled groups."""
    folder = tmp_path_factory.mktemp("profile")
    prompts = folder / "mine.jsonl"
    lines = [{"text": "one two three four five six " * 20, "label": "counting"}] * 2
    lines += [{"prompt": "fn main() { println!(); }", "label": "rust"}]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ["profile", str(DEMO_MODEL), "--prompts", str(prompts), "--json"]
    arguments += ["--trace", str(folder / "t.npz"), "--html", str(folder / "t.html")]
    arguments += ["--repeats", "2", "--new-tokens", "3", "--expert-memory", "50%"]
    done = CliRunner().invoke(cli.build_cli(), arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), folder / "t.npz", folder / "t.html"


def test_rows_are_by_label_and_by_length(profiled):
    report, _, _ = profiled
    rows = {(row["label"], row["prompt_tokens"]): row for row in report["rows"]}
    assert {("counting", None), ("counting", 32), ("rust", None)} <= set(rows)
    assert ("rust", 32) not in rows, "its prompt is shorter than that"
    assert {label for label, _ in rows} >= {"minimal", "long context", "code", "perturbed"}
    assert rows["minimal", None]["runs"] == 2
    assert (
        rows["minimal", None]["sequence_activation_mean"]
        < rows["long context", None]["sequence_activation_mean"]
        <= 1.0
    )
    assert all(row["tpot_ms_p95"] >= row["tpot_ms_p50"] > 0 for row in report["rows"])
    assert sum(row["bytes_a_token"] for row in report["rows"]) > 0


def test_the_trace_is_replayable_and_holds_every_token(profiled):
    report, trace_path, _ = profiled
    trace = RoutingTrace.read(trace_path)
    assert trace.num_experts == report["num_experts"] == 32
    assert len(trace.doc_offsets) == sum(row["runs"] for row in report["rows"])
    assert (trace.demands >= 0).all(), "each token chose top_k distinct experts of each layer"
    assert np.all(np.diff(trace.doc_offsets) > 2)


def test_the_page_needs_no_other_host(profiled):
    _, _, page = profiled
    text = page.read_text()
    assert "Load of experts: counting" in text
    assert "<script src=" not in text and '<link rel="stylesheet"' not in text


def test_batches_need_more_experts_than_tokens_alone(profiled):
    report, _, _ = profiled
    distinct = [row["distinct"] for row in report["distinct_by_batch"]]
    assert distinct == sorted(distinct) and distinct[0] == pytest.approx(4.0)
    assert report["reading"]


def test_one_character_in_twenty_is_replaced():
    import random

    text = "a quick brown fox jumps over the lazy dog again and again" * 4
    other = perturbed(text, random.Random(3))
    changed = sum(a != b for a, b in zip(text, other, strict=True))
    assert changed == len(text) // PERTURBED_ONE_IN
    assert len(other) == len(text)


def test_groups_are_the_same_for_the_same_seed():
    assert groups(5) == groups(5)
    assert groups(5) != groups(5, seed=1)
    assert {name: len(texts) for name, texts in groups().items()} == dict.fromkeys(groups(), 50)


@pytest.mark.parametrize("line", ["not json", '{"label": "x"}', '{"text": ""}', "[]"])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    done = CliRunner().invoke(cli.build_cli(), ["profile", str(DEMO_MODEL), "--prompts", str(path)])
    assert done.exit_code != 0
    assert "line 2" in str(done.exception)
