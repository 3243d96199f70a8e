"""Training batches: rows of packed tokens, each row from one domain, mixed in every batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_corpus import Record, renderings


def encode(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.uint16]:
    """All token ids of the texts one after another."""
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.asarray(e.ids, dtype=np.uint16) for e in encoded])


class StreamState(TypedDict):
    """Where one domain's stream stands."""

    epoch: int
    position: int


@dataclass
class Stream:
    """Endless tokens of one domain: each pass renders and shuffles the records anew."""

    records: list[Record]
    tokenizer: Tokenizer
    seed: int
    epoch: int = 0
    position: int = 0
    tokens: NDArray[np.uint16] = field(init=False)

    def __post_init__(self) -> None:
        self._load()

    def _load(self) -> None:
        texts = list(renderings(self.records, self.seed + self.epoch))
        self.tokens = encode(self.tokenizer, texts)

    def take(self, count: int) -> NDArray[np.uint16]:
        """The next ``count`` tokens; the last one is read again by the next call."""
        parts: list[NDArray[np.uint16]] = []
        missing = count
        while True:
            part = self.tokens[self.position : self.position + missing]
            parts.append(part)
            self.position += len(part)
            missing -= len(part)
            if not missing:
                break
            self.epoch, self.position = self.epoch + 1, 0
            self._load()
        self.position = max(0, self.position - 1)
        return np.concatenate(parts)

    def restore(self, state: StreamState) -> None:
        """Continue where a stream of the same records and seed stood."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._load()


class Batches:
    """Mixes the domains: each gets its token count to the power ``evenness``, times a factor."""

    def __init__(
        self,
        domains: dict[str, list[Record]],
        tokenizer: Tokenizer,
        seed: int,
        evenness: float = 0.5,
        factors: dict[str, float] | None = None,
    ) -> None:
        self.names = list(domains)
        self.streams = [
            Stream(records, tokenizer, seed * 1000 + 97 * i)
            for i, records in enumerate(domains.values())
        ]
        sizes = np.array([len(s.tokens) for s in self.streams], dtype=np.float64) ** evenness
        sizes *= [(factors or {}).get(name, 1.0) for name in self.names]
        self.shares: NDArray[np.float64] = sizes / sizes.sum()
        self.owed: NDArray[np.float64] = np.zeros(len(self.names))

    def next(self, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """ids and targets (rows x length) and each row's domain number."""
        ids = np.empty((rows, length + 1), dtype=np.int64)
        kinds = []
        for row in range(rows):
            self.owed += self.shares
            kind = int(self.owed.argmax())
            self.owed[kind] -= 1.0
            ids[row] = self.streams[kind].take(length + 1)
            kinds.append(kind)
        whole = torch.from_numpy(ids)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), torch.tensor(kinds)

    def state(self) -> dict[str, object]:
        """What ``restore`` needs."""
        streams = [{"epoch": s.epoch, "position": s.position} for s in self.streams]
        return {"streams": streams, "owed": self.owed.tolist()}

    def restore(self, state: dict[str, object]) -> None:
        """Continue from a saved state; rows differ in length without harm."""
        saved: list[StreamState] = state["streams"]  # type: ignore[assignment]
        for stream, one in zip(self.streams, saved, strict=True):
            stream.restore(one)
        self.owed = np.array(state["owed"], dtype=np.float64)


def heldout_rows(
    domains: dict[str, list[Record]], tokenizer: Tokenizer, length: int, rows: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Up to ``rows`` packed rows of every domain's held-out records, the same every time."""
    out = {}
    for name, records in domains.items():
        if not records:
            continue
        tokens = encode(tokenizer, list(renderings(records, 0))).astype(np.int64)
        count = min(rows, (len(tokens) - 1) // length)
        if count:
            ids = torch.from_numpy(tokens[: count * length]).view(count, length)
            target = torch.from_numpy(tokens[1 : count * length + 1]).view(count, length)
            out[name] = (ids, target)
    return out
