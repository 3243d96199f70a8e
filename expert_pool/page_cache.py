"""The host tier of a machine that computes experts on its CPU: the page cache, within a budget.

Experts that were read of late stay in the page cache, which all processes of the machine share;
nothing is copied into memory of our own beside the slots. What the budget does not hold is dropped
from the page cache again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expert_pool.file_reader import ByteArray, FileReader

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import Piece


class PageCacheReader(FileReader):
    """Reads through the page cache and keeps at most `budget_bytes` of what it read there.

    Each process counts what it read itself: several that use different experts together hold up
    to that much each.
    """

    def __init__(self, files: Sequence[Path], budget_bytes: int) -> None:
        super().__init__(files)
        self._budget = budget_bytes
        self._kept: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Bytes of the pieces in the cache by (file, offset), the longest unused first."""
        self._kept_bytes = 0
        self._books = threading.Lock()

    def read(self, file: int, offset: int, into: ByteArray) -> bool:
        """Fill `into` from `offset` on; True where no disk was needed."""
        if into.size > self._budget:
            return super().read(file, offset, into)
        descriptor = self._descriptor(file, direct=False)
        if self._read_cached(descriptor, offset, into):
            self._note(file, offset, into.size)
            return True
        self._read_buffered(file, offset, into)
        self._note(file, offset, into.size)
        return False

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Drop pieces from the cache, so that the next read comes from the disk."""
        for piece in pieces:
            with self._books:
                self._kept_bytes -= self._kept.pop((piece.file, piece.offset), 0)
            self._drop(piece.file, piece.offset, piece.nbytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes that it has left in the cache; the kernel may have taken some of them back."""
        return self._kept_bytes

    @staticmethod
    def _read_cached(descriptor: int, offset: int, into: ByteArray) -> bool:
        done = 0
        while done < into.size:
            try:
                got = os.preadv(descriptor, [into[done:].data], offset + done, os.RWF_NOWAIT)
            except OSError:  # not there, or a file system that cannot tell
                return False
            if got == 0:
                return False
            done += got
        return True

    def _note(self, file: int, offset: int, nbytes: int) -> None:
        victims = []
        with self._books:
            self._kept_bytes += nbytes - self._kept.pop((file, offset), 0)
            self._kept[file, offset] = nbytes
            while self._kept_bytes > self._budget:
                victim, size = self._kept.popitem(last=False)
                self._kept_bytes -= size
                victims.append((*victim, size))
        for at, start, size in victims:
            self._drop(at, start, size)

    def _drop(self, file: int, offset: int, nbytes: int) -> None:
        # Whole pages only: those at the edges belong to the neighbours too.
        descriptor = self._descriptor(file, direct=False)
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _descriptor(self, file: int, direct: bool) -> int:
        fresh = (file, direct) not in self._descriptors
        descriptor = super()._descriptor(file, direct)
        if fresh and not direct:
            # No reading beyond what is asked for: it would count for nobody.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor
