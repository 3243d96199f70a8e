"""Muon: momentum whose update is orthogonalised, for stacks of equal matrices.

Every parameter given to it is a matrix or a stack of matrices; all matrices of one shape in
the model are orthogonalised in one batched call. Everything else belongs in AdamW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(stack: Tensor, steps: int = STEPS) -> Tensor:
    """Matrices (n x rows x columns, rows <= columns) with singular values moved near 1.

    Every step multiplies by a polynomial of the matrix's own Gram matrix, so the steps run on
    that small square matrix and the polynomials' product is applied once at the end.
    """
    x = stack / (stack.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    gram = torch.bmm(x, x.transpose(1, 2))
    product: Tensor | None = None
    for left in range(steps - 1, -1, -1):
        factor = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        factor.diagonal(dim1=1, dim2=2).add_(_A)
        product = factor if product is None else torch.bmm(factor, product)
        if left:
            gram = torch.bmm(torch.bmm(factor, gram), factor)
    return x if product is None else torch.bmm(product, x)


class Muon(torch.optim.Optimizer):
    """lr is the size of an update's singular values; weight_decay is multiplied by lr.

    ``halves`` names (by identity) parameters that hold two matrices one above the other.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
        halves: Iterable[Tensor] = (),
    ) -> None:
        self.halves = {id(p) for p in halves}
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            wide: dict[tuple[int, int], list[tuple[Tensor, Tensor, bool]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                buffer = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                rows = p.shape[-2] // (2 if id(p) in self.halves else 1)
                matrices = update.reshape(-1, rows, p.shape[-1])
                tall = rows > p.shape[-1]
                if tall:
                    matrices = matrices.transpose(1, 2)
                wide[(matrices.shape[1], matrices.shape[2])].append((p, matrices, tall))
            for entries in wide.values():
                whole = orthogonalise(torch.cat([m for _, m, _ in entries]))
                for (p, m, tall), part in zip(
                    entries, torch.split(whole, [len(m) for _, m, _ in entries]), strict=True
                ):
                    scale = max(1.0, m.shape[2] / m.shape[1]) ** 0.5 if tall else 1.0
                    update = (part.transpose(1, 2) if tall else part).reshape(p.shape)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * scale)
