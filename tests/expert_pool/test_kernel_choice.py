"""Which kernel computes: settled once for a machine, the same for all that ask afterwards."""

import itertools
import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

from core.errors import BudgetError, SettingsError
from engine.backbone import Backbone
from engine.stock_runner import StockRunner
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.kernels import choice
from expert_pool.kernels.build import BuildError
from expert_pool.kernels.choice import choice_of
from expert_pool.kernels.measure import row_table as measured_row_table
from expert_pool.kernels.row_table import ALWAYS, BUCKETS, RowTable, measured_table
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from tests.engine.forced_steps import Forced, plans, token_ids
from tests.expert_pool.native_layers import kernels_or_skip, make_layer
from tests.models.families import cached_checkpoint


def never():
    return False


def test_native_is_used_up_to_the_first_bucket_that_torch_wins():
    table = measured_table(lambda rows: (1.0, 3.0 if rows <= 8 else 1.0), never)
    assert table.is_native(8, 1) and table.is_native(80, 10) and not table.is_native(16, 1)
    assert table.is_native(1, 5)
    assert not measured_table(lambda rows: (1.0, 1.0), never).is_native(1, 1)
    assert measured_table(lambda rows: (1.0, 2.0), never).is_native(10**6, 1)


def test_one_bad_measurement_does_not_decide():
    turn = itertools.count()
    table = measured_table(lambda rows: (9.0 if next(turn) == 0 else 1.0, 2.0), never)
    assert table == ALWAYS


def test_what_was_not_measured_in_time_goes_to_torch():
    asked = []

    def seconds(rows):
        asked.append(rows)
        return 1.0, 2.0

    table = measured_table(seconds, lambda: len(asked) >= 2)
    assert asked == list(BUCKETS[:2])
    assert table.is_native(2, 1) and not table.is_native(4, 1)


@pytest.mark.parametrize(
    ("layout", "activation", "gated", "biased"),
    [
        ("rows", "silu", True, False),
        ("rows", "relu2", False, True),
        ("transposed", "silu", True, False),
        ("interleaved", "clamped", True, True),
    ],
)
def test_this_machine_can_be_measured(layout, activation, gated, biased):
    kernels = kernels_or_skip()
    layer = make_layer(96, 64, activation, gated, biased, layout=layout)

    class Spec:
        params = tuple(layer.params)

    table = measured_row_table(kernels, Spec, layer.module(), layer.found)
    assert table.most_rows >= 0


def open_pool(**settings):
    index = CheckpointIndex.open(cached_checkpoint("qwen3_moe", "bfloat16"))
    return ExpertPool(index, PoolSettings(read_threads=1, **settings))


def attached(pool):
    """A model with the pool's experts, and its experts modules."""
    backbone = Backbone.open(pool.index, pool, context_tokens=64)
    return [backbone.model.get_submodule(layer.module_name) for layer in pool.index.layers]


def test_torch_can_be_asked_for():
    with closing(open_pool(kernel="torch")) as pool:
        assert not any(choice_of(module) for module in attached(pool))


def test_native_can_be_asked_for_and_computes_every_call():
    kernels_or_skip()
    with closing(open_pool(kernel="native")) as pool:
        chosen = [choice_of(module) for module in attached(pool)]
        assert all(one is not None and one.table == ALWAYS for one in chosen)
        rows = torch.zeros(1, 4)
        assert chosen[0].kernel_for(rows.bfloat16(), 9999, 1) is not None
        assert chosen[0].kernel_for(rows, 1, 1) is None


def no_library(name="native"):
    raise BuildError("not built")


def test_without_the_library_auto_is_torch_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(choice, "open_kernels", no_library)
    with closing(open_pool()) as pool, caplog.at_level(logging.INFO):
        assert not any(choice_of(module) for module in attached(pool))
    assert "torch: not built" in caplog.text


def test_without_the_library_native_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(choice, "open_kernels", no_library)
    with (
        closing(open_pool(kernel="native")) as pool,
        pytest.raises(SettingsError, match=r"pool\.kernel"),
    ):
        attached(pool)


def test_what_cannot_be_measured_for_lack_of_memory_is_torchs(monkeypatch):
    kernels_or_skip()

    def no_memory(*_):
        raise BudgetError("none left")

    monkeypatch.setattr(choice, "row_table", no_memory)
    monkeypatch.setattr(choice, "linear_table", no_memory)
    with closing(open_pool()) as pool:
        assert not any(choice_of(module) for module in attached(pool))


def test_native_that_finds_nothing_to_compute_says_so(monkeypatch, caplog):
    kernels_or_skip()
    monkeypatch.setattr(choice, "unsupported", lambda *_: "its experts are odd")
    with closing(open_pool(kernel="native")) as pool, caplog.at_level(logging.WARNING):
        assert not any(choice_of(module) for module in attached(pool))
    assert "torch computes all experts: its experts are odd" in caplog.text


def test_the_choice_is_a_matter_of_rows_and_of_experts_chosen_alone():
    kernels_or_skip()
    with closing(open_pool(kernel="native")) as pool:
        found = choice_of(attached(pool)[0])
        limited = choice.LayerChoice(found.kernel, RowTable(4.0))
        rows = torch.zeros(1, 4).bfloat16()
        assert limited.kernel_for(rows, 8, 2) is found.kernel
        assert limited.kernel_for(rows, 9, 2) is None
        assert limited.kernel_for(rows, 0, 0) is not None
        assert found.kernel_for(rows, 0, 0) is not None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_while_kernels_change_with_the_rows_answers_do_not_depend_on_where_experts_lie(
    family, monkeypatch
):
    kernels_or_skip()
    monkeypatch.setattr(choice, "row_table", lambda *_: RowTable(1.5))
    computed = set()
    stock_choice = choice.LayerChoice.kernel_for

    def observed(self, hidden, rows, experts):
        found = stock_choice(self, hidden, rows, experts)
        computed.add(found is not None)
        return found

    monkeypatch.setattr(choice.LayerChoice, "kernel_for", observed)
    index = CheckpointIndex.open(cached_checkpoint(family, "bfloat16"))
    answers = []
    for memory in (index.shape.min_slots_bytes, "all"):
        pool = ExpertPool(index, PoolSettings(expert_memory=memory, read_threads=1))
        with closing(pool):
            runner = StockRunner(Backbone.open(index, pool, context_tokens=64))
            logits = []
            for plan in plans(
                [Forced(token_ids(1, 30), (20,), 0), Forced(token_ids(2, 9), (4,), 1)]
            ):
                pool.begin_step()
                logits.append(runner.run(plan))
                pool.end_step()
            answers.append(logits)
    assert computed == {True, False}
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_sources_lie_beside_the_code():
    from expert_pool.kernels.build import SOURCES

    assert {path.suffix for path in Path(SOURCES).iterdir()} == {".h", ".cpp"}
