"""The store: threads that bring experts' bytes from the checkpoint into slots, and check them.

The step thread submits a `Load` for a slot that is LOADING and later takes the finished load
back; reader threads touch nothing but the load's slot. All tables stay with the step thread.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash

from core.errors import ExpertReadError
from expert_pool.file_reader import ByteArray, Reader
from expert_pool.host_tier import HostTier
from expert_pool.page_cache import PageCacheReader

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import CheckpointIndex, ExpertRecord

_log = logging.getLogger(__name__)
DEMAND = 0
PREFETCH = 1
PRELOAD = 2
KEEP_REST_S = 60.0
"""So long the host tier is given nothing more after it could not keep an expert."""
_ATTEMPTS = 2
"""A failed read or checksum is tried once more before the expert is quarantined."""


@dataclass(eq=False, slots=True)
class Load:
    """One expert on its way into one slot."""

    layer: int
    expert: int
    slot: torch.Tensor
    """uint8 [slot_bytes] on the pool's device; nobody else touches it until the load is back."""
    priority: int
    fence: torch.cuda.Event | None = None
    """On a CUDA device: what was computed with the slot's last expert, to wait for."""
    taken: bool = False
    """A reader has begun, or the step thread has called it off."""
    error: Exception | None = None
    digest: int | None = None
    record_bytes: int = 0
    from_host: bool = False
    """Its bytes came from the host tier, not from a disk."""
    full_reads: int = 0
    """Times that the whole record was read from disk."""
    attempts: int = 0
    began_s: float = 0.0
    """`time.perf_counter` when a reader took it up, and when it was done."""
    ended_s: float = 0.0


class ExpertStore:
    """Reader threads over one checkpoint. Demand goes before prefetch, that before preload."""

    def __init__(
        self,
        index: CheckpointIndex,
        reader: Reader,
        threads: int,
        expected_digest: Callable[[int, int], int | None] | None,
        host_tier: HostTier | None = None,
    ) -> None:
        """`expected_digest(layer, expert)` is the xxh3_64 to compare with, None to learn it.

        Without it, nothing is checked or learned. A `host_tier` is asked before the reader, and
        keeps what that read.
        """
        self._host_tier = host_tier
        self._keep_from_s = -math.inf
        self._keep_failed = False
        self._index = index
        self._reader = reader
        self._expected_digest = expected_digest
        self._queue: queue.PriorityQueue[tuple[int, int, Load | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._finished: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.in_flight = 0
        """Loads submitted and not yet taken back; the step thread's own count."""
        self._started = threading.Barrier(threads + 1)
        self._threads = [
            threading.Thread(target=self._serve, name=f"expert-reader-{i}", daemon=True)
            for i in range(threads)
        ]
        _start_with_one_torch_thread_each(self._threads, self._started)

    def submit(self, load: Load) -> None:
        """Queue a load whose expert is LOADING."""
        self.in_flight += 1
        self._queue.put((load.priority, next(self._order), load))

    def hurry(self, load: Load) -> None:
        """Turn a load that has not begun into demand."""
        if load.priority != DEMAND:
            load.priority = DEMAND
            self._queue.put((DEMAND, next(self._order), load))

    def call_off(self, load: Load) -> bool:
        """True if the load had not begun and never will; its slot is the caller's again."""
        if not self._take(load):
            return False
        self.in_flight -= 1
        return True

    def finished(self, wait: bool) -> list[Load]:
        """Loads that are done since last asked; with `wait`, at least one where any is due."""
        loads: list[Load] = []
        while self.in_flight:
            try:
                loads.append(self._finished.get(block=wait and not loads))
            except queue.Empty:
                break
            self.in_flight -= 1
        return loads

    def close(self) -> None:
        """Stop the threads; queued preloads are dropped, reads under way are finished."""
        for _ in self._threads:
            self._queue.put((DEMAND - 1, next(self._order), None))
        for thread in self._threads:
            thread.join()
        self._reader.close()
        if self._host_tier is not None:
            self._host_tier.close()

    def _take(self, load: Load) -> bool:
        with self._lock:
            if load.taken:
                return False
            load.taken = True
            return True

    def _serve(self) -> None:
        torch.get_num_threads()  # a thread's first look resets its count to the process's
        torch.set_num_threads(1)
        self._started.wait()
        workspace = _Workspace()
        while True:
            _, _, load = self._queue.get()
            if load is None:
                return
            if not self._take(load):
                continue
            load.began_s = time.perf_counter()
            try:
                self._fetch(load, workspace)
            except Exception as error:  # a reader must live on; the step thread reports it
                load.error = error
            load.ended_s = time.perf_counter()
            self._finished.put(load)
            self._keep(load, workspace)

    def _fetch(self, load: Load, workspace: _Workspace) -> None:
        record = self._index.record(load.layer, load.expert)
        load.record_bytes = record.nbytes
        expected = self._expected_digest(load.layer, load.expert) if self._expected_digest else None
        in_place = load.slot.device.type == "cpu" and self._host_tier is None
        host = load.slot if in_place else workspace.pinned(load.slot.numel())
        if self._host_tier is not None:
            load.from_host = self._host_tier.fetch(load.layer, load.expert, host.numpy(), expected)
            if load.from_host:
                _copy(host, load)
                return
        placement = self._index.placement(load.layer)
        pieces = (
            workspace.pieces(record)
            if placement is None
            else [
                host[start : start + record.pieces[piece].nbytes]
                for piece, start in sorted(placement)
            ]
        )
        arrays: list[ByteArray] = [piece.numpy() for piece in pieces]
        for attempt in range(1, _ATTEMPTS + 1):
            load.attempts = attempt
            try:
                self._read(load, record, arrays, expected)
                break
            except (OSError, ExpertReadError) as error:
                _log.warning("attempt %d of %d failed: %s", attempt, _ATTEMPTS, error)
                if isinstance(self._reader, PageCacheReader):
                    self._reader.forget(record.pieces)
                if attempt == _ATTEMPTS:
                    raise
        if placement is None:
            self._index.assemble(record, pieces, host)
        if not in_place:
            _copy(host, load)

    def _read(
        self, load: Load, record: ExpertRecord, arrays: list[ByteArray], expected: int | None
    ) -> None:
        hasher = xxhash.xxh3_64()
        cached = True
        for piece, array in zip(record.pieces, arrays, strict=True):
            cached = bool(self._reader.read(piece.file, piece.offset, array)) and cached
            if self._expected_digest is not None:
                hasher.update(array.data)
        load.from_host = cached
        load.full_reads += not cached
        if self._expected_digest is None:
            return
        load.digest = hasher.intdigest()
        if expected is not None and load.digest != expected:
            files = {self._index.files[piece.file].name for piece in record.pieces}
            raise ExpertReadError(
                f"layer {load.layer} expert {load.expert}: expected checksum {expected:016x}, "
                f"found {load.digest:016x} in {', '.join(sorted(files))}; the bytes on disk are "
                "not those that were there before: run `coterie verify` and restore the file"
            )

    def _keep(self, load: Load, workspace: _Workspace) -> None:
        """Gives the host tier what was just read, after the load was handed over."""
        if self._host_tier is None or load.error is not None or load.from_host:
            return
        if time.monotonic() < self._keep_from_s:
            return
        image = workspace.pinned(load.slot.numel()).numpy()
        try:
            self._host_tier.keep(load.layer, load.expert, image, load.digest)
        except Exception as error:  # a reader must live on, and the expert is served already
            with self._lock:
                self._keep_from_s = time.monotonic() + KEEP_REST_S
                said, self._keep_failed = self._keep_failed, True
            if not said:
                _log.warning(
                    "the host tier cannot keep an expert: %s; it is tried again every %.0f s",
                    error,
                    KEEP_REST_S,
                )


def _copy(host: torch.Tensor, load: Load) -> None:
    """From host memory into the slot; over when this returns."""
    if load.fence is not None:
        load.fence.synchronize()
    load.slot.copy_(host)
    if load.slot.device.type == "cuda":
        torch.cuda.current_stream(load.slot.device).synchronize()


class _Workspace:
    """One reader thread's buffers, kept between loads."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._pins = True

    def pieces(self, record: ExpertRecord) -> list[torch.Tensor]:
        """One uint8 tensor for each piece of a record that has to be assembled."""
        sizes = [piece.nbytes for piece in record.pieces]
        if [piece.numel() for piece in self._pieces] != sizes:
            self._pieces = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        return self._pieces

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that a device can copy from fast; pageable where there is no more."""
        if self._pinned.numel() < nbytes:
            try:
                self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pins)
            except RuntimeError as error:
                _log.warning("no pinned memory (%s): experts are copied from pageable", error)
                self._pins = False
                self._pinned = torch.empty(nbytes, dtype=torch.uint8)
        return self._pinned[:nbytes]


def _start_with_one_torch_thread_each(
    threads: list[threading.Thread], started: threading.Barrier
) -> None:
    """Readers set their own torch thread count to one; the process's count is put back after.

    `torch.set_num_threads` is per thread for those that run, but also the default of threads
    that come later.
    """
    ours = torch.get_num_threads()
    for thread in threads:
        thread.start()
    started.wait()
    torch.set_num_threads(ours)
