"""The host tier of a machine whose experts are computed on a device: one shared memory for all.

Two files in memory (`/dev/shm`), named after the model's content: slots with whole expert images,
and a table. All replicas of the machine read and fill them, and they outlive the replicas. Bytes
move by pread and pwrite, so a full memory is an error and not a signal.

Readers take no lock. They copy an image out and compare its checksum with the table's: an image
that was evicted or overwritten meanwhile, or that a dying writer left half, is a miss. Writers
take turns by flock, which ends with the process; the word that makes a record count is written
last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from core.config_model import format_bytes
from expert_pool.file_reader import ByteArray

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import CheckpointIndex

_log = logging.getLogger(__name__)
_HEADER = struct.Struct("<16sQQQ")
_MAGIC = b"coterie host 1\0\0"
_HEADER_BYTES = 4096
_RECORD = np.dtype([("slot", "<i8"), ("image", "<u8"), ("record", "<u8"), ("used", "<i8")])
"""By expert: its slot or -1, checksums of the image and of the bytes on disk, time of last use."""
_CLOSED = -1
_PATIENCE_S = 0.05
"""How long a writer waits for its turn before it does without."""


def shared_memory_folder() -> Path:
    """Where the host tiers of this user lie."""
    return Path("/dev/shm") / f"coterie-{os.getuid()}"


class HostTier:
    """One model's host tier as one process sees it. Called from several threads at once."""

    def __init__(
        self, index: CheckpointIndex, dtype: str, budget_bytes: int, folder: Path | None = None
    ) -> None:
        """Opens the tier, or makes it. Raises OSError where it cannot be had.

        A tier of another size that is in use stays as it is. Those of other models that nobody
        uses make way where there is too little memory.
        """
        folder = folder or shared_memory_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(
                errno.EPERM,
                "expected a folder that is ours alone: others could change weights",
                folder,
            )
        self._slot_bytes = max(layer.slot_bytes for layer in index.layers)
        counts = [layer.num_experts for layer in index.layers]
        self._starts = [0, *accumulate(counts)]
        num_slots = min(budget_bytes // self._slot_bytes, self._starts[-1])
        self._turn = threading.Lock()
        self.path = folder / f"{index.content_key}-{dtype}.experts"
        self._table = self._bytes = self._lock = _CLOSED
        try:
            self._open(folder, num_slots)
        except OSError:
            self._close_files()
            raise

    def _open(self, folder: Path, num_slots: int) -> None:
        with _locked(folder / "lock"):
            self._table = os.open(
                self.path.with_suffix(".table"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            if not self._open_table(num_slots):
                _make_room(folder, self.path, num_slots * self._slot_bytes)
                self._make(num_slots)
            fcntl.flock(self._table, fcntl.LOCK_SH)  # in use
        size = self._table_bytes(self.num_slots)
        self._map = mmap.mmap(self._table, size)
        self._records = np.frombuffer(
            self._map, dtype=_RECORD, count=self._starts[-1], offset=_HEADER_BYTES
        )
        self._owners = np.frombuffer(
            self._map,
            dtype="<i8",
            count=self.num_slots,
            offset=_HEADER_BYTES + self._records.nbytes,
        )
        """By slot: the record in it. A slot is taken where that record names it too."""
        self._bytes = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._lock = os.open(folder / f"{self.path.stem}.turn", os.O_RDWR | os.O_CREAT, 0o600)

    @property
    def capacity_bytes(self) -> int:
        """What it holds at most."""
        return self.num_slots * self._slot_bytes

    @property
    def num_kept(self) -> int:
        """Experts that it holds now."""
        return int(np.count_nonzero(self._records["slot"] >= 0))

    def fetch(self, layer: int, expert: int, into: ByteArray, expected: int | None) -> bool:
        """Fill `into` with an expert's image; False where it is not here, or not to be trusted.

        `expected` is the checksum of its bytes on disk, None where that is not known.
        """
        record = self._starts[layer] + expert
        slot, image, on_disk, _ = (int(word) for word in self._records[record])
        if not 0 <= slot < self.num_slots or (expected is not None and on_disk != expected):
            return False
        if os.preadv(self._bytes, [into.data], slot * self._slot_bytes) != into.size:
            return False
        if xxhash.xxh3_64_intdigest(into.data) != image:
            return False
        self._records["used"][record] = time.monotonic_ns()
        return True

    def keep(self, layer: int, expert: int, image: ByteArray, on_disk: int | None) -> bool:
        """Store an image; the longest unused one makes room. False where there was no turn."""
        record = self._starts[layer] + expert
        with self._my_turn() as mine:
            if not mine or not self.num_slots:
                return False
            slot = self._slot_for(record)
            self._owners[slot] = -1
            if os.pwrite(self._bytes, image.data, slot * self._slot_bytes) != image.size:
                return False
            row = self._records[record : record + 1]
            row["image"] = xxhash.xxh3_64_intdigest(image.data)
            row["record"] = on_disk or 0
            row["used"] = time.monotonic_ns()
            self._owners[slot] = record
            row["slot"] = slot
        return True

    def close(self) -> None:
        """Let go of it; what it holds stays for the next replica."""
        del self._records, self._owners
        with contextlib.suppress(BufferError):  # a reader's view is alive until it is collected
            self._map.close()
        self._close_files()

    def _close_files(self) -> None:
        for descriptor in (self._bytes, self._table, self._lock):
            if descriptor != _CLOSED:
                os.close(descriptor)
        self._table = self._bytes = self._lock = _CLOSED

    def remove(self) -> None:
        """Delete it; processes that use it keep what they have open."""
        for suffix in (".experts", ".table", ".turn"):
            self.path.with_suffix(suffix).unlink(missing_ok=True)

    def _slot_for(self, record: int) -> int:
        """A slot that nobody's record names any more, emptied if need be."""
        slots = self._records["slot"]
        if 0 <= slots[record] < self.num_slots:
            slot = int(slots[record])
            slots[record] = -1
            return slot
        # Copied and bounded: another process may write here, and what died here may have.
        owners = np.where(self._owners < slots.size, self._owners, -1)
        taken = (owners >= 0) & (slots[np.maximum(owners, 0)] == np.arange(owners.size))
        if not taken.all():
            return int(np.argmin(taken))
        slot = int(np.argmin(self._records["used"][owners]))
        slots[owners[slot]] = -1
        return slot

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[bool]:
        if not self._turn.acquire(timeout=_PATIENCE_S):
            yield False
            return
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while not _try_lock(self._lock):
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.001)
            try:
                yield True
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._turn.release()

    def _table_bytes(self, num_slots: int) -> int:
        return _HEADER_BYTES + self._starts[-1] * _RECORD.itemsize + max(1, num_slots) * 8

    def _open_table(self, num_slots: int) -> bool:
        """Whether there is one that can be used as it is."""
        header = os.pread(self._table, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            return False
        magic, slot_bytes, records, found = _HEADER.unpack(header)
        if (magic, slot_bytes, records) != (_MAGIC, self._slot_bytes, self._starts[-1]):
            return False
        if os.fstat(self._table).st_size != self._table_bytes(found) or not self.path.exists():
            return False
        if found != num_slots:
            if _try_lock(self._table):
                return False  # nobody uses it
            _log.warning(
                "%s holds %s and is in use: host_memory of %s is not applied to it",
                self.path,
                format_bytes(found * self._slot_bytes),
                format_bytes(num_slots * self._slot_bytes),
            )
        self.num_slots = found
        return True

    def _make(self, num_slots: int) -> None:
        table = self.path.with_suffix(".table")
        os.close(self._table)
        self._table = _CLOSED
        self.remove()
        try:
            self._fill(table, num_slots)
        except OSError:
            self.remove()  # half of one is of use to nobody
            raise

    def _fill(self, table: Path, num_slots: int) -> None:
        self._table = os.open(table, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        size = self._table_bytes(num_slots)
        os.posix_fallocate(self._table, 0, size)
        os.pwrite(self._table, b"\xff" * (size - _HEADER_BYTES), _HEADER_BYTES)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.truncate(descriptor, num_slots * self._slot_bytes)
        os.close(descriptor)
        # Last: without it, the table counts for nothing.
        header = _HEADER.pack(_MAGIC, self._slot_bytes, self._starts[-1], num_slots)
        os.pwrite(self._table, header, 0)
        self.num_slots = num_slots


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _make_room(folder: Path, ours: Path, need: int) -> None:
    """Removes tiers of other models that no process uses, while memory is short."""
    for path in sorted(folder.glob("*.experts"), key=lambda p: p.stat().st_mtime):
        stat = os.statvfs(folder)
        if stat.f_bavail * stat.f_frsize >= need:
            return
        if path == ours:
            continue
        try:
            table = os.open(path.with_suffix(".table"), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            path.unlink(missing_ok=True)  # half made
            continue
        try:
            if _try_lock(table):
                _log.info("%s is used by nobody and makes way", path)
                for suffix in (".experts", ".table", ".turn"):
                    path.with_suffix(suffix).unlink(missing_ok=True)
        finally:
            os.close(table)
