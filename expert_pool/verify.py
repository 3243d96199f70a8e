"""Reads every byte of a checkpoint, learns checksums, and compares with those known before."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from core.errors import CheckpointError
from expert_pool.checkpoint_index import CheckpointIndex
from expert_pool.checksums import ChecksumBook

_CHUNK_BYTES = 8 * 1024 * 1024
_THREADS = 4
_QUEUED = 64
"""Reads handed to the threads ahead of time, so that memory does not grow with the model."""

Extent = tuple[int, int, int]
"""(file, offset, bytes)."""


@dataclass(slots=True)
class VerifyReport:
    """What a full read found."""

    experts: int = 0
    tensors: int = 0
    """Backbone tensors."""
    bytes_read: int = 0
    learned: int = 0
    """Checksums that were not known before."""
    mismatched: list[str] = field(default_factory=list)
    """What differs from its known checksum, with its files."""
    checksums_path: Path | None = None
    earlier_books: list[Path] = field(default_factory=list)
    """Checksums kept for other bytes in this folder: weights replaced, or a damaged backbone."""
    seconds: float = 0.0


def total_bytes(index: CheckpointIndex) -> int:
    """Bytes that `verify_all` reads."""
    experts = sum(
        layer.num_experts * index.record(layer.ordinal, 0).nbytes for layer in index.layers
    )
    return experts + sum(entry.nbytes for entry in index.backbone.values())


def verify_all(
    index: CheckpointIndex, progress: Callable[[int], None] | None = None
) -> VerifyReport:
    """Reads all experts and backbone tensors of `index`; saves checksums learned on the way.

    `progress` is called with the number of bytes read since the last call. Raises CheckpointError
    when a file cannot be read.
    """
    started = time.perf_counter()
    book = ChecksumBook(index)
    report = VerifyReport()
    with ExitStack() as opened:
        descriptors = [os.open(path, os.O_RDONLY) for path in index.files]
        for descriptor in descriptors:
            opened.callback(os.close, descriptor)
        pool = opened.enter_context(ThreadPoolExecutor(_THREADS, "verify"))
        places = threading.BoundedSemaphore(_QUEUED)
        running: list[tuple[_Item, Future[int]]] = []
        for item in _items(index):
            places.acquire()
            future = pool.submit(_digest, index, descriptors, item.extents)
            future.add_done_callback(lambda _: places.release())
            running.append((item, future))
            while running and running[0][1].done():
                _note(index, book, report, *running.pop(0), progress)
        for item, future in running:
            _note(index, book, report, item, future, progress)
    report.checksums_path = book.save()
    report.earlier_books = book.earlier_books()
    report.seconds = time.perf_counter() - started
    return report


@dataclass(frozen=True, slots=True)
class _Item:
    """One expert (`tensor` empty) or one backbone tensor."""

    extents: tuple[Extent, ...]
    ordinal: int = 0
    expert: int = 0
    tensor: str = ""


def _items(index: CheckpointIndex) -> Iterator[_Item]:
    for layer in index.layers:
        for expert in range(layer.num_experts):
            record = index.record(layer.ordinal, expert)
            extents = tuple((piece.file, piece.offset, piece.nbytes) for piece in record.pieces)
            yield _Item(extents, ordinal=layer.ordinal, expert=expert)
    for name, entry in index.backbone.items():
        yield _Item(((entry.file, entry.offset, entry.nbytes),), tensor=name)


def _digest(index: CheckpointIndex, descriptors: list[int], extents: tuple[Extent, ...]) -> int:
    hasher = xxhash.xxh3_64()
    for file, offset, nbytes in extents:
        end = offset + nbytes
        while offset < end:
            try:
                chunk = os.pread(descriptors[file], min(_CHUNK_BYTES, end - offset), offset)
            except OSError as error:
                raise CheckpointError(f"Cannot read {index.files[file]}: {error}.") from error
            if not chunk:
                raise CheckpointError(
                    f"{index.files[file]} ended at byte {offset}, expected {end}: the file was cut "
                    "short while it was read."
                )
            hasher.update(chunk)
            offset += len(chunk)
    return hasher.intdigest()


def _note(
    index: CheckpointIndex,
    book: ChecksumBook,
    report: VerifyReport,
    item: _Item,
    future: Future[int],
    progress: Callable[[int], None] | None,
) -> None:
    digest = future.result()
    if item.tensor:
        known = book.get_tensor(item.tensor)
        book.learn_tensor(item.tensor, digest)
        report.tensors += 1
        what = f"tensor {item.tensor}"
    else:
        known = book.get(item.ordinal, item.expert)
        book.learn(item.ordinal, item.expert, digest)
        report.experts += 1
        what = f"expert {item.expert} of {index.layers[item.ordinal].module_name}"
    report.learned += known is None
    if known is not None and known != digest:
        files = sorted({index.files[file].name for file, _, _ in item.extents})
        report.mismatched.append(f"{what} in {', '.join(files)}")
    nbytes = sum(extent[2] for extent in item.extents)
    report.bytes_read += nbytes
    if progress is not None:
        progress(nbytes)
