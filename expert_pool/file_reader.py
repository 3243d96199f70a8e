"""Reads byte ranges of checkpoint files, past the page cache where the file system can."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from core.model_shape import align_up

ByteArray = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)
_BLOCK_BYTES = 4096
"""Offset, length and address of a direct read are multiples of this."""
_STAGING_BYTES = 4 * 1024**2


class Reader(Protocol):
    """Where experts' bytes come from. Called from several threads at once."""

    def read(self, file: int, offset: int, into: ByteArray) -> bool | None:
        """Fill `into` with the bytes of `file` from `offset` on. Raises OSError if it cannot.

        True where they came from the host's memory and no disk was needed.
        """

    def close(self) -> None:
        """Let go of the files."""


class FileReader:
    """Direct reads (O_DIRECT) into a page-aligned buffer of the thread, then copied into place.

    A direct read must begin and end at block boundaries, and tensors do not: so the blocks around
    them are read, and the wanted bytes copied out. Where the file system refuses direct reads,
    that file is read through the page cache from then on.
    """

    def __init__(self, files: Sequence[Path], direct: bool = True) -> None:
        self._files = tuple(files)
        self._direct = [direct and hasattr(os, "O_DIRECT")] * len(self._files)
        self._descriptors: dict[tuple[int, bool], int] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    def read(self, file: int, offset: int, into: ByteArray) -> bool:
        """Fill `into` from `offset` on. Raises OSError, on a short file too."""
        if self._direct[file]:
            try:
                self._read_direct(file, offset, into)
                return False
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._direct[file] = False
                _log.info("%s: no direct reads here, buffered instead", self._files[file])
        self._read_buffered(file, offset, into)
        return False

    def close(self) -> None:
        """Close the files; not while a read is under way."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _read_direct(self, file: int, offset: int, into: ByteArray) -> None:
        descriptor = self._descriptor(file, direct=True)
        staging = self._staging()
        done = 0
        while done < into.size:
            lead = (offset + done) % _BLOCK_BYTES
            start = offset + done - lead
            want = min(align_up(lead + into.size - done, _BLOCK_BYTES), staging.size)
            got = os.preadv(descriptor, [staging[:want].data], start)
            useful = min(got - lead, into.size - done)
            if useful <= 0:
                raise self._short(file, offset, into.size, done)
            np.copyto(into[done : done + useful], staging[lead : lead + useful])
            done += useful

    def _read_buffered(self, file: int, offset: int, into: ByteArray) -> None:
        descriptor = self._descriptor(file, direct=False)
        done = 0
        while done < into.size:
            got = os.preadv(descriptor, [into[done:].data], offset + done)
            if got == 0:
                raise self._short(file, offset, into.size, done)
            done += got

    def _short(self, file: int, offset: int, want: int, got: int) -> OSError:
        return OSError(
            errno.EIO,
            f"expected {want} bytes at offset {offset}, found {got}: the file was cut short",
            str(self._files[file]),
        )

    def _descriptor(self, file: int, direct: bool) -> int:
        with self._lock:
            descriptor = self._descriptors.get((file, direct))
            if descriptor is None:
                flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
                descriptor = os.open(self._files[file], flags)
                self._descriptors[file, direct] = descriptor
            return descriptor

    def _staging(self) -> ByteArray:
        staging: ByteArray | None = getattr(self._thread, "staging", None)
        if staging is None:
            # An anonymous map starts at a page boundary, which a direct read needs.
            staging = np.frombuffer(mmap.mmap(-1, _STAGING_BYTES), dtype=np.uint8)
            self._thread.staging = staging
        return staging
