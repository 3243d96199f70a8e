"""Checksums of a model's bytes, learned once and kept beside the model.

A checksum is xxh3_64 over the bytes of one expert (its pieces in order) or of one backbone tensor.
The book of one model is a small file named after the model's layout key, so that books of two
models in one cache folder are never mixed. It lies in `<model>/.coterie/`, or, where that cannot be
written, in `$COTERIE_CACHE` (default `~/.cache/coterie`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from core.cache_folder import cache_folder, is_there
from core.whole_file import write_whole
from expert_pool.checkpoint_index import CheckpointIndex

_log = logging.getLogger(__name__)
_MAGIC = b"coterie checksums 1\n"
SAVE_EVERY_S = 30.0
"""What was learned is kept after so long."""


class _Contents(msgspec.Struct):
    layout_key: str
    experts: list[int]
    """Experts of each layer."""
    known: bytes
    """One byte for each expert of each layer: 1 where its checksum was learned."""
    digests: bytes
    """The checksums as little-endian 64-bit integers, in the same order."""
    tensors: dict[str, int]
    """Checksums of backbone tensors by their checkpoint name."""


class ChecksumBook:
    """The checksums that are known of one model. Used by one thread; `save` to keep them."""

    def __init__(self, index: CheckpointIndex) -> None:
        """Reads what was saved before for this very model, if anything."""
        self._layout_key = index.layout_key
        self._experts = [layer.num_experts for layer in index.layers]
        self._starts = [0, *accumulate(self._experts)]
        self._known = np.zeros(self._starts[-1], dtype=np.uint8)
        self._digests = np.zeros(self._starts[-1], dtype="<u8")
        self._tensors: dict[str, int] = {}
        self._changed = False
        self._unsaved_since: float | None = None
        name = f"checksums-{index.layout_key}.bin"
        place = hashlib.sha256(str(index.model_dir.resolve()).encode()).hexdigest()[:16]
        self.paths = (
            index.model_dir / ".coterie" / name,
            cache_folder() / "checksums" / f"{index.layout_key}-{place}.bin",
        )
        """Where the book may lie, in order of preference."""
        for path in reversed(self.paths):
            self._merge(self._read(path))

    def get(self, ordinal: int, expert: int) -> int | None:
        """The checksum of an expert's record, None where it was not learned yet."""
        place = self._starts[ordinal] + expert
        return int(self._digests[place]) if self._known[place] else None

    def learn(self, ordinal: int, expert: int, digest: int) -> None:
        """Notes the checksum of an expert's record; one that is known already stays."""
        place = self._starts[ordinal] + expert
        if not self._known[place]:
            self._digests[place] = digest
            self._known[place] = 1
            self._changed = True

    def learn_new(self, ordinal: int, expert: int, digest: int, now_s: float) -> None:
        """`learn` by a clock: `save_if_due` keeps it SAVE_EVERY_S later."""
        if self.get(ordinal, expert) is None:
            self.learn(ordinal, expert, digest)
            if self._unsaved_since is None:
                self._unsaved_since = now_s

    def save_if_due(self, now_s: float = math.inf) -> None:
        """`save` what `learn_new` learned long enough ago; without `now_s`, all of it."""
        if self._unsaved_since is not None and now_s - self._unsaved_since > SAVE_EVERY_S:
            self._unsaved_since = None
            self.save()

    def get_tensor(self, name: str) -> int | None:
        """The checksum of a backbone tensor, None where it was not learned yet."""
        return self._tensors.get(name)

    def learn_tensor(self, name: str, digest: int) -> None:
        """Notes the checksum of a backbone tensor; one that is known already stays."""
        if name not in self._tensors:
            self._tensors[name] = digest
            self._changed = True

    def earlier_books(self) -> list[Path]:
        """Books beside the model that were kept for other bytes in the same folder."""
        own = self.paths[0]
        return sorted(path for path in own.parent.glob("checksums-*.bin") if path != own)

    @property
    def num_known(self) -> int:
        """Experts whose checksum is known."""
        return int(self._known.sum())

    def save(self) -> Path | None:
        """Keeps what was learned; returns the file, None (after a warning) where none can be.

        A book that another process saved meanwhile is merged in. The file is replaced as a whole:
        a full disk or a crash leaves the old one.
        """
        written = next((path for path in self.paths if is_there(path)), None)
        if not self._changed and written is not None:
            return written
        failures = []
        for path in self.paths:
            self._merge(self._read(path))
            try:
                self._write(path)
            except OSError as error:
                failures.append(f"{path}: {error.strerror or error}")
                continue
            self._changed = False
            return path
        _log.warning(
            "Checksums cannot be kept and will be learned again next time (%s). Make one of these "
            "places writable or set COTERIE_CACHE to a folder that is.",
            "; ".join(failures),
        )
        return None

    def _write(self, path: Path) -> None:
        contents = _Contents(
            layout_key=self._layout_key,
            experts=self._experts,
            known=self._known.tobytes(),
            digests=self._digests.tobytes(),
            tensors=self._tensors,
        )
        body = msgspec.msgpack.encode(contents)
        raw = _MAGIC + xxhash.xxh3_64(body).digest() + body
        write_whole(path, lambda stream: stream.write(raw), mode=0o644)

    def _read(self, path: Path) -> _Contents | None:
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        body = raw[len(_MAGIC) + 8 :]
        whole = _MAGIC + xxhash.xxh3_64(body).digest() == raw[: len(_MAGIC) + 8]
        try:
            contents = msgspec.msgpack.decode(body, type=_Contents) if whole else None
        except msgspec.DecodeError:
            contents = None
        if contents is None:
            _log.warning("%s is damaged and left aside; checksums are learned again.", path)
            return None
        if contents.layout_key != self._layout_key or contents.experts != self._experts:
            _log.warning("%s belongs to another model and is left aside.", path)
            return None
        return contents

    def _merge(self, contents: _Contents | None) -> None:
        """Adds what `contents` knows and this book does not."""
        if contents is None:
            return
        known = np.frombuffer(contents.known, dtype=np.uint8)
        digests = np.frombuffer(contents.digests, dtype="<u8")
        fresh = (known == 1) & (self._known == 0)
        self._digests[fresh] = digests[fresh]
        self._known[fresh] = 1
        self._tensors = {**contents.tensors, **self._tensors}
