"""Row tables on disk: all processes of a machine answer alike, however they start."""

import json
import logging
import multiprocessing
import os
import time

import pytest

from expert_pool.kernels import kept_table
from expert_pool.kernels.kept_table import TRIES, table_for
from expert_pool.kernels.row_table import ALWAYS, RowTable


def end_process():
    """Forgets what this process knows, and frees its locks: the next one that asks is another."""
    kept_table._known.clear()
    for handle in kept_table._held.values():
        os.close(handle)
    kept_table._held.clear()


def another_process():
    """The next one that asks is another process, and this one lives on. Returns its end."""
    handles = [*kept_table._held.values()]
    kept_table._known.clear()
    kept_table._held.clear()
    return lambda: [os.close(handle) for handle in handles]


class Load:
    """What other programs use, as a share of all cores."""

    others_share = 0.0

    def __init__(self):
        self._now = 0.0

    def __call__(self):
        self._now += 1.0
        own = self._now / 4
        return self._now, self.others_share * self._now + own, own


@pytest.fixture(autouse=True)
def load(monkeypatch):
    monkeypatch.setattr(kept_table, "_known", {})
    monkeypatch.setattr(kept_table, "_held", {})
    load = Load()
    monkeypatch.setattr(kept_table, "_processor_seconds", load)
    yield load
    end_process()


def table_path():
    (path,) = (kept_table.cache_folder() / "expert-kernels").glob("*.json")
    return path


def test_a_table_is_measured_once_and_kept():
    asked = []

    def measure():
        asked.append(1)
        return RowTable(6.0)

    assert table_for({"processor": "a"}, measure) == RowTable(6.0)
    end_process()
    assert table_for({"processor": "a"}, measure) == RowTable(6.0)
    assert len(asked) == 1
    table_for({"processor": "b"}, measure)
    assert len(asked) == 2


def test_no_limit_survives_the_disk():
    table_for({"processor": "a"}, lambda: ALWAYS)
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(0.0)) == ALWAYS


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
    (path,) = (kept_table.cache_folder() / "expert-kernels").glob("*.json")
    path.write_text(content)
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(7.0)) == RowTable(7.0)
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(8.0)) == RowTable(7.0)


def test_where_nothing_can_be_kept_each_process_measures(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "file"))
    assert table_for({"processor": "a"}, lambda: RowTable(3.0)) == RowTable(3.0)


def test_numbers_that_are_none_are_measured_again():
    for content in ("NaN", "-1", "[3]", "1" + "0" * 400):
        table_for({"processor": "a"}, lambda: RowTable(3.0))
        whole = json.loads(table_path().read_text())
        text = json.dumps(whole | {"most_rows": 55}).replace("55", content)
        table_path().write_text(text)
        end_process()
        assert table_for({"processor": "a"}, lambda: RowTable(7.0)) == RowTable(7.0)
        end_process()


def test_what_was_measured_on_a_quiet_machine_stays(load):
    load.others_share = 0.05
    table_for({"processor": "a"}, lambda: RowTable(3.0))
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(9.0)) == RowTable(3.0)


def test_what_was_measured_on_a_busy_machine_is_measured_again_when_nobody_uses_it(load, caplog):
    load.others_share = 0.6
    with caplog.at_level(logging.WARNING):
        assert table_for({"processor": "a"}, lambda: RowTable(3.0)) == RowTable(3.0)
    assert "60% of this machine" in caplog.text and table_path().name in caplog.text
    load.others_share = 0.0
    ends = another_process()
    # A replica that joins agrees with the one that serves.
    assert table_for({"processor": "a"}, lambda: RowTable(9.0)) == RowTable(3.0)
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(9.0)) == RowTable(3.0)
    ends()
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(9.0)) == RowTable(9.0)
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(5.0)) == RowTable(9.0)


def test_a_machine_that_is_never_quiet_settles_all_the_same(load):
    load.others_share = 0.7
    found = []
    for number in range(TRIES + 2):
        found.append(table_for({"processor": "a"}, lambda number=number: RowTable(float(number))))
        end_process()
    assert [table.most_rows for table in found] == [0.0, 1.0, 2.0, 2.0, 2.0]


def _slow(results):
    def measure():
        time.sleep(0.5)
        return RowTable(4.0)

    results.put(table_for({"processor": "a"}, measure).most_rows)


def test_who_comes_while_another_measures_waits_and_takes_its_answer():
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    first = context.Process(target=_slow, args=(results,))
    first.start()
    folder = kept_table.cache_folder() / "expert-kernels"
    until = time.monotonic() + 20
    while not list(folder.glob("*.lock")) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert table_for({"processor": "a"}, lambda: RowTable(8.0)) == RowTable(4.0)
    assert results.get(timeout=20) == 4.0
    first.join()


def test_where_nothing_can_be_locked_the_first_answer_holds(monkeypatch):
    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(kept_table.fcntl, "flock", no_locks)
    assert table_for({"processor": "a"}, lambda: RowTable(3.0)) == RowTable(3.0)
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(8.0)) == RowTable(3.0)


def test_where_nothing_can_be_linked_tables_are_kept_all_the_same(monkeypatch):
    def no_links(*_):
        raise OSError("no links here")

    monkeypatch.setattr(kept_table, "_open_lock", lambda _: None)
    monkeypatch.setattr(kept_table.os, "link", no_links)
    assert table_for({"processor": "a"}, lambda: RowTable(3.0)) == RowTable(3.0)
    end_process()
    assert table_for({"processor": "a"}, lambda: RowTable(8.0)) == RowTable(3.0)


def test_a_table_of_a_folder_that_is_read_only_is_used(monkeypatch):
    table_for({"processor": "a"}, lambda: RowTable(3.0))
    end_process()

    def read_only(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr(kept_table.os, "open", read_only)
    monkeypatch.setattr(kept_table.tempfile, "mkstemp", read_only)
    assert table_for({"processor": "a"}, lambda: RowTable(8.0)) == RowTable(3.0)
    assert table_for({"processor": "b"}, lambda: RowTable(5.0)) == RowTable(5.0)


def test_without_a_home_folder_each_process_measures(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kept_table, "cache_folder", nowhere)
    assert table_for({"processor": "a"}, lambda: RowTable(3.0)) == RowTable(3.0)


def test_what_other_programs_use_is_seen(monkeypatch):
    monkeypatch.undo()
    there, busy, own = kept_table._processor_seconds()
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    later = kept_table._processor_seconds()
    assert later[2] - own >= 0.05 and later[0] > there
    assert later[1] > busy
