"""The gate of a layer that is still to come, applied to a hidden state that is here already.

The residual stream changes little from one layer to the next, so a later layer's router, given
what this layer's experts are given, ranks its experts nearly as it will. A router is found by
its place and shape, not by its family: beside the experts, named `gate` or `router`, with one
matrix [experts, hidden]. All supported families have that, with two limits:

- Gemma 4 norms and scales what its router sees in another way than what its experts see, and a
  limit to groups of experts (DeepSeek V2 and V3, GLM 4, EXAONE) is not applied: there the ranks
  are less exact;
- Nemotron-H with latent experts gives them another width than its router's, so there is no guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MOST_ROWS = 32
"""Rows that are looked at; with more, they are picked at even distances."""
_NAMES = ("gate", "router")
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")


@dataclass(slots=True)
class _Gate:
    weight: torch.Tensor
    """[experts, hidden]"""
    bias: torch.Tensor | None
    """[experts], part of the logits."""
    correction: torch.Tensor | None
    """[experts], added to each expert's score where experts are chosen."""
    softmax: bool
    """Whether the correction is added to a softmax over all experts; else to sigmoids."""
    top_k: int


class NextGate:
    """The gates of all MoE layers of one model, by the pool's numbers."""

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        num_experts: Sequence[int],
        top_k: Sequence[int],
    ) -> None:
        """`names` are those of the experts modules."""
        self._gates = [
            _find(model, name, experts, k)
            for name, experts, k in zip(names, num_experts, top_k, strict=True)
        ]

    def knows(self, layer: int) -> bool:
        """Whether a layer's gate was found."""
        return self._gates[layer] is not None

    def begin(self, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Scores [experts] of `layer` on the host, from `hidden` [T, H]; None where it cannot.

        An expert's score is that of the row that wants it most, relative to the last expert that
        this row would choose. On an accelerator they are there when the device is next waited
        for: this does not wait.
        """
        gate = self._gates[layer]
        if gate is None or hidden.shape[-1] != gate.weight.shape[1]:
            return None
        if hidden.shape[0] > MOST_ROWS:
            hidden = hidden[:: -(-hidden.shape[0] // MOST_ROWS)]
        scores = torch.nn.functional.linear(hidden.to(gate.weight.dtype), gate.weight).float()
        if gate.bias is not None:
            scores = scores + gate.bias
        if gate.correction is not None:
            scores = scores.softmax(-1) if gate.softmax else scores.sigmoid()
            scores = scores + gate.correction
        if scores.shape[0] > 1:
            scores = scores - scores.topk(gate.top_k, dim=-1).values[:, -1:]
            scores = scores.amax(dim=0)
        else:
            scores = scores[0]
        if scores.device.type == "cpu":
            return scores
        try:
            host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
        except RuntimeError:  # no pinned memory: a copy that waits, and no failed step
            return scores.cpu()
        return host.copy_(scores, non_blocking=True)


def as_scores(scores: torch.Tensor, width: int) -> npt.NDArray[np.float32] | None:
    """What `begin` gave, for `width` experts; None where a number is not finite."""
    found: npt.NDArray[np.float32] = np.full(width, -np.inf, np.float32)
    found[: scores.shape[0]] = scores.numpy()
    return found if np.isfinite(found[: scores.shape[0]]).all() else None


def _find(model: torch.nn.Module, name: str, num_experts: int, top_k: int) -> _Gate | None:
    """The gate beside an experts module: in the nearest module around it that has one."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        block = model.get_submodule(".".join(parts[:depth]))
        routers = [getattr(block, n) for n in _NAMES if hasattr(block, n)]
        routers = [router for router in routers if isinstance(router, torch.nn.Module)]
        if routers:
            return _gate_of(block, routers[0], parts[depth], num_experts, top_k)
    return None


def _gate_of(
    block: torch.nn.Module, router: torch.nn.Module, experts: str, num_experts: int, top_k: int
) -> _Gate | None:
    matrices = [p for p in router.parameters() if p.dim() == 2 and p.shape[0] == num_experts]
    if len(matrices) != 1:
        return None
    biases: dict[str, Any] = {n: p for n, p in router.named_parameters() if n.endswith("bias")}
    plain = [p for n, p in biases.items() if n.split(".")[-1] == "bias" and p.dim() == 1]
    corrections = [
        (name, tensor)
        for tensors in (block.named_parameters(), block.named_buffers())
        for name, tensor in tensors
        if name.split(".")[-1] in _CORRECTIONS
        and not name.startswith(f"{experts}.")
        and tensor.numel() == num_experts
    ]
    name, correction = corrections[0] if corrections else ("", None)
    return _Gate(
        weight=matrices[0],
        bias=plain[0] if plain else None,
        correction=None if correction is None else correction.reshape(-1),
        softmax="moe_statics" in name,
        top_k=top_k,
    )
