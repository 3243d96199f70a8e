"""Which kernel computes: settled once for a machine, the same for all that ask afterwards."""

import itertools
import logging
import multiprocessing
from contextlib import closing
from pathlib import Path

import pytest
import torch

from core.errors import SettingsError
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.kernels import choice, row_table
from expert_pool.kernels.build import BuildError
from expert_pool.kernels.choice import choice_of
from expert_pool.kernels.measure import row_table as measured_row_table
from expert_pool.kernels.row_table import ALWAYS, BUCKETS, RowTable, measured_table, table_for
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings
from tests.expert_pool.native_layers import kernels_or_skip, make_layer
from tests.models.families import cached_checkpoint


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(row_table, "_known", {})


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


def test_a_table_is_measured_once_and_kept():
    asked = []

    def measure():
        asked.append(1)
        return RowTable(6.0)

    assert table_for({"processor": "a"}, measure) == RowTable(6.0)
    row_table._known.clear()  # another process
    assert table_for({"processor": "a"}, measure) == RowTable(6.0)
    assert len(asked) == 1
    table_for({"processor": "b"}, measure)
    assert len(asked) == 2


def test_no_limit_survives_the_disk():
    table_for({"processor": "a"}, lambda: ALWAYS)
    row_table._known.clear()
    assert table_for({"processor": "a"}, lambda: RowTable(0.0)) == ALWAYS


def test_who_measured_later_takes_the_first_answer():
    def measure():
        # Meanwhile somebody else was quicker.
        row_table._lock.release()
        try:
            assert table_for({"processor": "a"}, lambda: RowTable(2.0)) == RowTable(2.0)
        finally:
            row_table._lock.acquire()
        row_table._known.clear()
        return RowTable(50.0)

    assert table_for({"processor": "a"}, measure) == RowTable(2.0)


def _ask(number, results):
    results.put(table_for({"processor": "a"}, lambda: RowTable(float(number))).most_rows)


def test_processes_that_start_together_agree():
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_ask, args=(n, results)) for n in range(6)]
    for process in processes:
        process.start()
    found = {results.get(timeout=30) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"most_rows": "many"}'])
def test_a_table_that_cannot_be_read_is_measured_again(content):
    table_for({"processor": "a"}, lambda: RowTable(3.0))
    (path,) = (row_table.cache_folder() / "expert-kernels").glob("*.json")
    path.write_text(content)
    row_table._known.clear()
    assert table_for({"processor": "a"}, lambda: RowTable(7.0)) == RowTable(7.0)
    row_table._known.clear()
    assert table_for({"processor": "a"}, lambda: RowTable(8.0)) == RowTable(7.0)


def test_where_nothing_can_be_kept_each_process_measures(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "file"))
    assert table_for({"processor": "a"}, lambda: RowTable(3.0)) == RowTable(3.0)


@pytest.mark.parametrize(("gated", "biased"), [(True, False), (False, True)])
def test_this_machine_can_be_measured(gated, biased):
    kernels = kernels_or_skip()
    layer = make_layer(96, 64, gated=gated, biased=biased)

    class Spec:
        params = tuple(layer.params)

    table = measured_row_table(kernels, Spec, layer.module(), 0)
    assert table.most_rows >= 0


def open_pool(**settings):
    index = CheckpointIndex.open(cached_checkpoint("qwen3_moe", "bfloat16"))
    return ExpertPool(index, PoolSettings(read_threads=1, **settings))


def attached(pool):
    """A model with the pool's experts, and its experts modules."""
    from engine.backbone import Backbone

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


def test_sources_lie_beside_the_code():
    from expert_pool.kernels.build import SOURCES

    assert {path.suffix for path in Path(SOURCES).iterdir()} == {".h", ".cpp"}
