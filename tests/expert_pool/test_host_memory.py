"""What is there to spare, and what a host_memory setting makes of it."""

from __future__ import annotations

import pytest

from expert_pool.host_memory import _group_room, available_bytes
from expert_pool.settings import PoolSettings, host_memory_bytes


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_limits_of_all_groups_on_the_way_count(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    write(
        tmp_path / "a",
        memory__max=1000,
        memory__current=700,
        memory__stat="anon 500\nfile 200\nshmem 50",
    )
    write(tmp_path / "a/b", memory__max="max", memory__current=1, memory__stat="anon 1")
    assert _group_room(membership, tmp_path) == [450]


def test_version_1_of_the_groups(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("7:cpu:/x\n5:memory,hugetlb:/x\n")
    write(
        tmp_path / "memory/x",
        memory__limit_in_bytes=900,
        memory__usage_in_bytes=950,
        memory__stat="total_cache 100\ntotal_shmem 10",
    )
    assert _group_room(membership, tmp_path) == [40]
    assert _group_room(tmp_path / "none") == []
    assert available_bytes() > 0


@pytest.mark.parametrize(
    ("setting", "on_device", "expected"),
    [
        ("off", True, 0),
        (False, True, 0),
        ("all", True, 1000),
        (5000, True, 1000),
        (300, False, 300),
        ("50%", False, 600),
        ("auto", True, 600),
        ("auto", False, 0),
    ],
)
def test_bytes_of_a_setting_with_1200_to_spare_and_1000_of_experts(setting, on_device, expected):
    assert host_memory_bytes(setting, 1000, 1200, on_device) == expected


def test_auto_on_a_cpu_is_all_where_there_is_plenty():
    assert host_memory_bytes("auto", 1000, 2000, on_device=False) == 1000
    assert host_memory_bytes("auto", 1000, -5, on_device=True) == 0


@pytest.mark.parametrize("wrong", ["many", "120%", -1, None, True])
def test_other_values_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected|Input"):
        PoolSettings(host_memory=wrong)
