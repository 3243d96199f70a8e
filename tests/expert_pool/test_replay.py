"""Replay of traces, the formats they come in, and the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from core.errors import SettingsError
from expert_pool.policies import LruPolicy
from expert_pool.replay import POLICIES, replay, replay_policy
from expert_pool.routing_trace import RoutingTrace, TraceError
from expert_pool.settings import PoolSettings
from tests.synthetic_trace import synthetic_trace

CSV = """# route_trace v1
# model=tiny arch=moe n_layer=2 n_expert=5 n_expert_used=2
# layer=0 expert_bytes=10 dense_bytes=20
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,4,0.6,0,10
0,0,0,0,1,1,0.4,0,10
0,1,1,0,0,1,0.6,1,0
0,1,1,1,0,3,0.6,0,10
1,0,0,1,0,2,0.5,0,10
"""


@pytest.fixture(scope="module")
def results():
    return list(replay(synthetic_trace(tokens=300), POLICIES, (8, 16)))


def cell(results, policy, capacity, scope="per_layer"):
    (found,) = [r for r in results if (r.policy, r.capacity, r.scope) == (policy, capacity, scope)]
    return found


def test_misses_of_lru_by_hand():
    trace = RoutingTrace.of("hand", np.array([[[0, 1]], [[2, 1]], [[0, 3]], [[1, 2]]]), 4)
    # Three slots: 0 1 | 2 | (0 is there) 3, one of 1, 2 leaves: tie, the lower | 1
    ((misses, _),) = replay_policy(LruPolicy(1, 4), trace.demands, 4, [3])
    assert misses == 2 + 1 + 1 + 1


def test_every_policy_has_a_row_for_each_capacity(results):
    rows = [(r.policy, r.capacity, r.scope) for r in results]
    expected = [(name, c, "per_layer") for name in POLICIES for c in (8, 16)]
    expected += [(name, c, "global") for name in ("lru", "belady") for c in (8, 16)]
    assert rows == expected


def test_one_policy_is_the_default(results):
    assert {(r.policy, r.scope) for r in results if r.default} == {
        (PoolSettings().policy, "per_layer")
    }


def test_figures_agree_with_each_other(results):
    accesses = 300 * 4 * 6
    for found in results:
        optimum = cell(results, "belady", found.capacity, found.scope)
        assert found.hit_rate == pytest.approx(1 - found.misses / accesses)
        assert found.misses_over_belady == pytest.approx(found.misses / optimum.misses)
        assert found.misses_over_belady >= 1
        assert (found.decision_us_p99 is None) == (found.policy == "belady")


def test_more_room_never_hurts_lru_or_the_optimum(results):
    for name in ("lru", "belady"):
        for scope in ("per_layer", "global"):
            assert cell(results, name, 16, scope).misses < cell(results, name, 8, scope).misses


def test_one_pool_can_do_better_with_foresight_and_worse_without(results):
    assert cell(results, "belady", 8, "global").misses <= cell(results, "belady", 8).misses
    assert cell(results, "lru", 8, "global").misses > cell(results, "lru", 8).misses


def test_room_for_all_misses_each_expert_once():
    trace = synthetic_trace(tokens=60, layers=2, experts=16)
    distinct = sum(len(np.unique(trace.demands[:, layer])) for layer in range(2))
    for found in replay(trace, POLICIES, (16,)):
        assert found.misses == distinct


def test_unknown_policy_and_small_capacity_are_refused():
    trace = synthetic_trace(tokens=5)
    with pytest.raises(SettingsError, match=r"lru, lfu, affinity, belady, found 'fifo'"):
        list(replay(trace, ("fifo",), (8,)))
    with pytest.raises(SettingsError, match=r"at least the 6 experts .* found 5"):
        list(replay(trace, ("lru",), (5,)))


def test_npz_round_trip(tmp_path):
    trace = synthetic_trace(tokens=12)
    path = tmp_path / "trace.npz"
    shuffled = trace.demands[:, :, ::-1].astype(np.uint8)
    np.savez(path, expert_ids=shuffled, doc_offsets=np.array([0, 5]), num_experts=64)
    found = RoutingTrace.read(path)
    assert (found.demands == trace.demands).all()
    assert (found.num_experts, found.doc_offsets.tolist()) == (64, [0, 5])


def test_csv_has_ragged_steps(tmp_path):
    path = tmp_path / "trace.route.csv"
    path.write_text(CSV)
    found = RoutingTrace.read(path)
    assert found.demands.tolist() == [
        [[1, 4], [-1, -1]],
        [[1, -1], [3, -1]],
        [[-1, -1], [2, -1]],
    ]
    assert (found.num_experts, found.doc_offsets.tolist()) == (5, [0, 2])
    assert (found.accesses, found.widest) == (5, 2)
    assert next(replay(found, ("lru",), (2,))).misses == 4


def test_a_repeated_expert_is_one_demand():
    found = RoutingTrace.of("twice", np.array([[[3, 1, 3]]]), 4)
    assert found.demands.tolist() == [[[1, 3, -1]]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.npz", None, "no such trace file"),
        ("trace.txt", b"", "ends in .npz or .csv"),
        ("trace.npz", b"PK\x03\x04 torn", "not an npz file"),
        ("trace.csv", b"turn,phase\n", "'# route_trace v1' as its first line"),
        ("trace.csv", b"# route_trace v1\nturn,phase,step\n", "lacks the columns expert, layer"),
        ("trace.csv", CSV.replace("4,0.6", "x,0.6").encode(), "data line 1"),
        ("trace.csv", CSV.replace("0,4,0.6", "0,5,0.6").encode(), r"0\.\.4, found -1\.\.5"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        RoutingTrace.read(path)


def test_npz_without_ids_or_with_wrong_ones(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, other=np.zeros(3))
    with pytest.raises(TraceError, match="an array expert_ids"):
        RoutingTrace.read(path)
    np.savez(path, expert_ids=np.zeros((2, 2)))
    with pytest.raises(TraceError, match="whole numbers"):
        RoutingTrace.read(path)
    np.savez(path, expert_ids=np.zeros((2, 2), int))
    with pytest.raises(TraceError, match=r"\[tokens, layers, k\], found \[2, 2\]"):
        RoutingTrace.read(path)


def command(*arguments):
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, typer; from app.commands.replay import replay; typer.run(replay)",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_prints_a_list(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, expert_ids=synthetic_trace(tokens=40).demands)
    done = command(path, "--capacity", "8,12", "--policies", "lru,belady", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 8
    assert set(rows[0]) == {
        "policy",
        "default",
        "capacity",
        "scope",
        "hit_rate",
        "misses",
        "misses_over_belady",
        "decision_us_p99",
    }
    table = command(path, "--capacity", "8", "--policies", "all")
    assert table.returncode == 0, table.stderr
    assert "affinity" in table.stdout
    assert "global" in table.stdout


@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set")
def test_the_recorded_traces_can_be_read():
    routing = Path(os.environ["COTERIE_DATA"]) / "routing"
    shapes = {
        "esft_lite_intent.npz": (8222, 26, 6, 64),
        "esft_lite_law.npz": (8327, 26, 6, 64),
        "qwen3_30b_a3b.route.csv": (156, 48, 6, 128),
    }
    for name, (steps, layers, width, experts) in shapes.items():
        trace = RoutingTrace.read(routing / name)
        assert trace.demands.shape == (steps, layers, width)
        assert trace.num_experts == experts
