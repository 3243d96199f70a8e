"""Which tiers a pool has below its slots, by its settings and the machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from expert_pool.file_reader import FileReader, Reader
from expert_pool.host_memory import available_bytes
from expert_pool.host_tier import HostTier
from expert_pool.page_cache import PageCacheReader
from expert_pool.settings import PoolSettings, expert_memory_bytes, host_memory_bytes

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import CheckpointIndex

_log = logging.getLogger(__name__)


def host_tier_bytes(
    index: CheckpointIndex, settings: PoolSettings, device: torch.device, spare_bytes: int
) -> int:
    """Bytes of the host tier beside slots that are already counted in `spare_bytes`."""
    all_bytes = sum(layer.num_experts * layer.slot_bytes for layer in index.layers)
    on_device = device.type != "cpu"
    if not on_device and settings.host_memory == "auto":
        granted = expert_memory_bytes(settings.expert_memory, all_bytes)
        if granted >= all_bytes:
            return 0  # each is read once
    return host_memory_bytes(settings.host_memory, all_bytes, spare_bytes, on_device)


def open_reader(index: CheckpointIndex, settings: PoolSettings, device: torch.device) -> Reader:
    """Reads past the page cache, or through it where that is the host tier."""
    if device.type == "cpu" and settings.direct_io:
        all_bytes = sum(layer.num_experts * layer.slot_bytes for layer in index.layers)
        # The slots are reserved, but their memory is not yet taken.
        slots = min(expert_memory_bytes(settings.expert_memory, all_bytes), all_bytes)
        nbytes = host_tier_bytes(index, settings, device, available_bytes() - slots)
        if nbytes:
            return PageCacheReader(index.files, nbytes)
    return FileReader(index.files, direct=settings.direct_io)


def open_host_tier(
    index: CheckpointIndex, settings: PoolSettings, device: torch.device
) -> HostTier | None:
    """The machine's shared host tier beside a device; None where there is none, or cannot be."""
    if device.type == "cpu":
        return None
    nbytes = host_tier_bytes(index, settings, device, available_bytes())
    if not nbytes:
        return None
    dtype = str(index.dtype).removeprefix("torch.")
    try:
        return HostTier(index, dtype, nbytes)
    except OSError as error:
        _log.warning("no host tier (%s): experts that are not on %s are read", error, device)
        return None
