"""Labelled texts for the domain classifier: read, grouped by what they share, and split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import CoterieError
from deployments.domain_settings import UNKNOWN
from deployments.domain_weights import LABEL

PARTS = 10
HELD_OUT = 0
"""The part that training never looks at; the one after it calibrates."""
_PASSAGE_CHARS = 40
_SAMPLED = 8
"""Of the passages of a text one in so many is compared, picked by what it says."""
_COMMON = 24
"""A passage in more records than this is a form of words, not a sign of one origin."""
_HALF = 0.5
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MAX_FAULTS = 8
_SHOWN_CHARS = 80
_MIN_LABELS = 2

_Hashes = NDArray[np.uint64]
_Places = NDArray[np.int64]
Progress = Callable[[str, int, int], None]
"""What is done, so many of how many."""


class RecordError(CoterieError):
    """A file of labelled texts holds what cannot be read; the message names lines."""


@dataclass(frozen=True, slots=True)
class Record:
    """One labelled text."""

    text: str
    label: str
    answer: str = ""
    group: str = ""
    """Records of one group come from one origin, and are held out together or not at all."""

    @property
    def part(self) -> int:
        """Which tenth it belongs to: told by its group alone."""
        digest = blake2b(self.group.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % PARTS


def read_records(path: Path, progress: Progress | None = None) -> list[Record]:
    """The lines of a file, or of a folder with a folder of .jsonl files for each domain.

    A line of a file is {"text", "label"}; in a folder the label is the folder's name. "prompt" is
    as good a name as "text", "answer" may go with it, and "group" names the origin. Where it is
    left out, records that share a passage are one group. Raises RecordError.
    """
    try:
        sources = list(_sources(path))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    records: list[Record] = []
    faults: list[str] = []
    for number, (file, folder_label) in enumerate(sources):
        if progress is not None:
            progress("reading", number, len(sources))
        for line, found in _lines(file, folder_label):
            if isinstance(found, Record):
                records.append(found)
            else:
                faults.append(f"{file}:{line}: {found}")
                if len(faults) == _MAX_FAULTS:
                    raise RecordError("\n".join([*faults, "..."]))
    if faults:
        raise RecordError("\n".join(faults))
    if not records:
        raise RecordError(f'{path}: expected lines {{"text", "label"}}, found none')
    return _grouped(records, progress)


def _sources(path: Path) -> Iterator[tuple[Path, str | None]]:
    if not path.is_dir():
        yield path, None
        return
    found = sorted(path.glob("*/*.jsonl"))
    if not found:
        raise RecordError(f"{path}: expected DOMAIN/*.jsonl in this folder, found none")
    for file in found:
        if not LABEL.fullmatch(file.parent.name):
            raise RecordError(f"{file.parent}: {_label_fault(file.parent.name)}")
        yield file, file.parent.name


def _lines(file: Path, folder_label: str | None) -> Iterator[tuple[int, Record | str]]:
    """Each line that is not empty: its number, and the record or what is wrong."""
    around = ""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                found = _record(line, folder_label)
                if isinstance(found, Record):
                    # Lines that quote a part of the text before them belong to it.
                    if not found.group and around and found.text in around:
                        found = replace(found, group=f"\0{file}\0{around[:200]}")
                    elif not found.answer:
                        around = found.text
                        found = replace(found, group=found.group or f"\0{file}\0{around[:200]}")
                yield number, found
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror or error}") from error


def _record(line: bytes, folder_label: str | None) -> Record | str:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"expected a JSON object, found {line[:40]!r} ({error})"
    if not isinstance(data, dict):
        return f"expected a JSON object, found {line[:40]!r}"
    text = data.get("text", data.get("prompt"))
    if not isinstance(text, str) or not text.strip():
        return f'expected "text" with at least one character, found {_shown(text)}'
    label = folder_label or data.get("label")
    if not isinstance(label, str) or not LABEL.fullmatch(label):
        return _label_fault(label)
    answer, group = data.get("answer", ""), data.get("group", "")
    if not isinstance(answer, str) or not isinstance(group, str | int):
        return 'expected texts as "answer" and "group"'
    return Record(text, label, answer, str(group))


def _label_fault(label: object) -> str:
    return f'expected a "label" of 1 to 64 of a-z, 0-9, _ and -, found {_shown(label)}'


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS]


def domain_labels(records: list[Record]) -> list[str]:
    """The domains, sorted; texts labelled "unknown" are of none. Raises RecordError."""
    labels = sorted({record.label for record in records} - {UNKNOWN})
    if len(labels) < _MIN_LABELS:
        raise RecordError(f"expected texts of at least {_MIN_LABELS} labels, found {labels}")
    return labels


def _grouped(records: list[Record], progress: Progress | None) -> list[Record]:
    """Each with the name of its group, which depends on the group's texts alone."""
    leaders = list(range(len(records)))

    def leader(number: int) -> int:
        while leaders[number] != number:
            leaders[number] = number = leaders[leaders[number]]
        return number

    def join(one: int, other: int) -> None:
        leaders[leader(one)] = leader(other)

    named: dict[str, int] = {}
    owners: list[int] = []
    passages = []
    for number, record in enumerate(records):
        if progress is not None and number % 1000 == 0:
            progress("grouping", number, len(records))
        if record.group:
            join(number, named.setdefault(record.group, number))
        if not record.group or record.group.startswith("\0"):
            found = _passages(record.text)
            passages.append(found)
            owners += [number] * found.size
    if passages:
        for one, other in _alike(np.concatenate(passages), np.asarray(owners), len(records)):
            join(one, other)
    names: dict[int, str] = {}
    for number, record in enumerate(records):
        own = record.group if record.group[:1] not in ("", "\0") else record.text
        root = leader(number)
        names[root] = min(names.get(root, own), own)
    return [replace(record, group=names[leader(number)]) for number, record in enumerate(records)]


def _alike(passages: _Hashes, owners: _Places, count: int) -> Iterator[tuple[int, int]]:
    """Pairs of records of which one has half of its passages from the other."""
    sizes = np.bincount(owners, minlength=count)
    order = np.argsort(passages, kind="stable")
    _, begins, counts = np.unique(passages[order], return_index=True, return_counts=True)
    owners = owners[order]
    shared: Counter[tuple[int, int]] = Counter()
    several = (counts > 1) & (counts <= _COMMON)
    for begin, many in zip(begins[several].tolist(), counts[several].tolist(), strict=True):
        shared.update(combinations(owners[begin : begin + many].tolist(), 2))
    for (one, other), many in shared.items():
        if many >= _HALF * min(sizes[one], sizes[other]):
            yield one, other


def _passages(text: str) -> _Hashes:
    """Hashes of some passages of the text, each once; of a short text one, of all of it."""
    plain = " ".join(text.lower().split()).encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(plain, dtype=np.uint32).astype(np.uint64)
    size = min(_PASSAGE_CHARS, codes.size)
    powers = np.full(size, _BASE)
    powers[0] = 1
    windows = np.lib.stride_tricks.sliding_window_view(codes, size)
    hashes = windows @ np.multiply.accumulate(powers)
    hashes ^= hashes >> np.uint64(29)
    hashes *= _BASE
    if hashes.size == 1:
        return hashes
    return np.unique(hashes[hashes >> np.uint64(32) & np.uint64(_SAMPLED - 1) == 0])
