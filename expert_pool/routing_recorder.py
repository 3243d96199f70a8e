"""Records which experts each token chose, while an engine runs: for profiles and replays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int16]


class RoutingRecorder:
    """Put `note` at `ExpertPool.observer`. Meant for one sequence at a time.

    Rows are those of the steps, in order: of a prompt its tokens, then one a decode step.
    """

    def __init__(self, num_layers: int) -> None:
        self._layers: list[list[Ids]] = [[] for _ in range(num_layers)]
        self._documents: list[Ids] = []

    def note(self, layer: int, top_k_index: torch.Tensor) -> None:
        """`top_k_index` [T, K] is what the router of `layer` chose for the next T tokens."""
        self._layers[layer].append(top_k_index.to("cpu", torch.int16).numpy().copy())

    def end_document(self) -> Ids:
        """Expert ids [tokens, layers, k] since the last call. Raises ValueError for no tokens."""
        if not all(self._layers):
            raise ValueError("expected at least one step of every layer, found none")
        document = np.stack([np.concatenate(parts) for parts in self._layers], axis=1)
        self._layers = [[] for _ in self._layers]
        self._documents.append(document)
        return document

    def save(self, path: Path, num_experts: int) -> None:
        """All documents as a trace that `coterie replay` reads."""
        lengths = [len(document) for document in self._documents]
        np.savez_compressed(
            path,
            expert_ids=np.concatenate(self._documents),
            doc_offsets=np.cumsum([0, *lengths[:-1]]),
            num_experts=np.array(num_experts),
        )
