"""Recorded routing: which experts each step demanded of each layer.

Two formats are read. `.npz` with `expert_ids` [tokens, layers, k] and, where documents matter,
`doc_offsets` (first token of each); optional `num_experts`, and the router's `gate_weights` of
the same shape. And the route-trace CSV (`# route_trace
v1`), one line for each expert of a layer of a step. One row of an npz is one step of one token.
"""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from core.errors import CoterieError
from expert_pool.oracle import ABSENT
from expert_pool.tables import IntArray

_CSV_MARK = "# route_trace v1"
_CSV_COLUMNS = ("turn", "phase", "step", "layer", "expert")


class TraceError(CoterieError):
    """A file is not a routing trace that can be read."""


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """`demands` [steps, layers, k]: distinct experts, ascending, then ABSENT.

    `weights`, where known, are what the router gave each of them.
    """

    name: str
    demands: IntArray
    num_experts: int
    doc_offsets: IntArray
    weights: npt.NDArray[np.float32] | None = None

    @classmethod
    def read(cls, path: Path) -> RoutingTrace:
        """Read an npz or CSV trace. Raises TraceError naming what is wrong with it."""
        if not path.is_file():
            raise TraceError(f"{path}: no such trace file")
        if path.suffix == ".npz":
            return _read_npz(path)
        if path.suffix == ".csv":
            return _read_csv(path)
        raise TraceError(f"{path}: expected a trace that ends in .npz or .csv")

    @classmethod
    def of(
        cls,
        name: str,
        expert_ids: IntArray,
        num_experts: int,
        doc_offsets: IntArray | None = None,
        weights: npt.NDArray[np.floating] | None = None,
    ) -> RoutingTrace:
        """From expert ids [steps, layers, k] in any order; a repeated or ABSENT id counts not."""
        if expert_ids.ndim != 3 or not expert_ids.size:
            raise TraceError(
                f"{name}: expected expert_ids of shape [tokens, layers, k], "
                f"found {list(expert_ids.shape)}"
            )
        lowest, highest = int(expert_ids.min()), int(expert_ids.max())
        if lowest < ABSENT or highest >= num_experts:
            raise TraceError(
                f"{name}: expected expert ids of 0..{num_experts - 1}, found {lowest}..{highest}"
            )
        beyond = num_experts
        ids = np.where(expert_ids == ABSENT, beyond, expert_ids)
        given = None if weights is None else weights.astype(np.float32)
        ids, given = _sorted(ids, given)
        ids[:, :, 1:][ids[:, :, 1:] == ids[:, :, :-1]] = beyond
        ids, given = _sorted(ids, given)
        demands = np.where(ids == beyond, ABSENT, ids).astype(np.int64)
        offsets = np.zeros(1, np.int64) if doc_offsets is None else doc_offsets.astype(np.int64)
        return cls(name, demands, num_experts, offsets, given)

    @property
    def accesses(self) -> int:
        """Demand accesses: one for each step, layer and distinct expert."""
        return int((self.demands != ABSENT).sum())

    @property
    def widest(self) -> int:
        """Most experts that one step demands of one layer."""
        return int((self.demands != ABSENT).sum(axis=2).max())


def _sorted(
    ids: IntArray, weights: npt.NDArray[np.float32] | None
) -> tuple[IntArray, npt.NDArray[np.float32] | None]:
    if weights is None:
        return np.sort(ids, axis=2), None
    order = np.argsort(ids, axis=2, kind="stable")
    return np.take_along_axis(ids, order, 2), np.take_along_axis(weights, order, 2)


def _read_npz(path: Path) -> RoutingTrace:
    try:
        with np.load(path, allow_pickle=False) as stored:
            names = stored.files
            if "expert_ids" not in names:
                raise TraceError(f"{path}: expected an array expert_ids, found {names}")
            expert_ids = stored["expert_ids"]
            offsets = stored["doc_offsets"] if "doc_offsets" in names else None
            weights = stored["gate_weights"] if "gate_weights" in names else None
            named = int(stored["num_experts"]) if "num_experts" in names else None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path}: not an npz file: {error}") from error
    if not np.issubdtype(expert_ids.dtype, np.integer):
        raise TraceError(f"{path}: expected whole numbers in expert_ids, found {expert_ids.dtype}")
    ids = expert_ids.astype(np.int64)
    num_experts = named if named is not None else int(ids.max(initial=0)) + 1
    if weights is not None and weights.shape != ids.shape:
        raise TraceError(
            f"{path}: expected gate_weights of the shape of expert_ids, {list(ids.shape)}, "
            f"found {list(weights.shape)}"
        )
    return RoutingTrace.of(str(path), ids, num_experts, offsets, weights)


def _read_csv(path: Path) -> RoutingTrace:
    with path.open(newline="", encoding="utf-8") as file:
        if file.readline().strip() != _CSV_MARK:
            raise TraceError(f"{path}: expected {_CSV_MARK!r} as its first line")
        sizes: dict[str, int] = {}
        lines = _without_comments(file, sizes)
        reader = csv.DictReader(lines)
        missing = set(_CSV_COLUMNS) - set(reader.fieldnames or ())
        if missing:
            raise TraceError(f"{path}: lacks the columns {', '.join(sorted(missing))}")
        steps: dict[tuple[int, int, int], int] = {}
        cells: dict[tuple[int, int], list[int]] = {}
        for number, row in enumerate(reader, start=1):
            try:
                turn, phase, step, layer, expert = (int(row[name]) for name in _CSV_COLUMNS)
            except (TypeError, ValueError) as error:
                raise TraceError(f"{path}: data line {number}: {error}") from error
            at = steps.setdefault((turn, phase, step), len(steps))
            cells.setdefault((at, layer), []).append(expert)
    if not cells:
        raise TraceError(f"{path}: holds no steps")
    layers = max(sizes.get("n_layer", 0), 1 + max(layer for _, layer in cells))
    width = max(map(len, cells.values()))
    ids = np.full((len(steps), layers, width), ABSENT, dtype=np.int64)
    for (at, layer), experts in cells.items():
        ids[at, layer, : len(experts)] = experts
    num_experts = sizes.get("n_expert", int(ids.max()) + 1)
    starts = {turn: at for (turn, _, _), at in reversed(steps.items())}
    offsets = np.array(sorted(starts.values()), dtype=np.int64)
    return RoutingTrace.of(str(path), ids, num_experts, offsets)


def _without_comments(lines: Iterable[str], sizes: dict[str, int]) -> Iterable[str]:
    for line in lines:
        if not line.startswith("#"):
            yield line
            continue
        for name, value in re.findall(r"\b(n_layer|n_expert)=(\d+)", line):
            sizes[name] = int(value)
