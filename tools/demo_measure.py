"""Measurements of an exported demo model: perplexity, expert use and samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TOKENS = 512
"""Documents are scored up to this many tokens."""
BATCH_TOKENS = 4096


class ExpertUse:
    """Counts, while a model runs, how often each expert of each layer is chosen."""

    def __init__(self, model: Any) -> None:
        self.layers = len(model.model.layers)
        self.experts: int = model.config.num_experts
        self.counts = torch.zeros(self.layers, self.experts)
        self.mask = torch.ones(1, dtype=torch.bool)
        self.handles = [
            layer.mlp.gate.register_forward_hook(self._hook(index))
            for index, layer in enumerate(model.model.layers)
        ]

    def _hook(self, index: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            chosen = output[2][self.mask.reshape(-1)]
            self.counts[index] += torch.bincount(chosen.reshape(-1), minlength=self.experts)

        return hook

    def close(self) -> None:
        """Stop counting."""
        for handle in self.handles:
            handle.remove()

    def take(self) -> Tensor:
        """Counts (layers x experts) since the last call."""
        out, self.counts = self.counts, torch.zeros_like(self.counts)
        return out


def batches(documents: list[list[int]]) -> Iterator[list[list[int]]]:
    """Documents of like length together, at most about BATCH_TOKENS with padding."""
    group: list[list[int]] = []
    for document in sorted(documents, key=len):
        if group and (len(group) + 1) * len(document) > BATCH_TOKENS:
            yield group
            group = []
        group.append(document)
    if group:
        yield group


@torch.no_grad()
def score(model: Any, documents: list[list[int]], stop: int, use: ExpertUse) -> tuple[float, int]:
    """Summed loss in nats and number of scored tokens; each document starts a new context."""
    total, count = 0.0, 0
    cut = [[stop, *d[:MAX_TOKENS]] for d in documents]
    for group in batches(cut):
        width = max(len(d) for d in group)
        ids = torch.full((len(group), width), stop)
        target = torch.full((len(group), width), -100)
        for row, d in enumerate(group):
            ids[row, : len(d)] = torch.tensor(d)
            target[row, : len(d) - 1] = torch.tensor(d[1:])
        ids, target = ids[:, :-1], target[:, :-1]
        use.mask = target != -100
        logits = model(input_ids=ids, use_cache=False).logits
        total += float(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"))
        count += int(use.mask.sum())
    return total, count


def unigram_loss(train: list[list[int]], documents: list[list[int]], vocabulary: int) -> float:
    """Summed loss in nats of a smoothed token-frequency model of the same domain."""
    flat = torch.tensor([t for d in train for t in d])
    counts = torch.bincount(flat, minlength=vocabulary).double() + 1.0
    logs = (counts / counts.sum()).log()
    wanted = torch.tensor([t for d in documents for t in d[:MAX_TOKENS]])
    return -float(logs[wanted].sum())


def top_overlap(one: Tensor, two: Tensor, top: int = 8) -> float:
    """Mean over layers of the share of experts that both top lists have."""
    first, second = (c.topk(top, dim=1).indices.tolist() for c in (one, two))
    shares = [len(set(a) & set(b)) / top for a, b in zip(first, second, strict=True)]
    return sum(shares) / len(shares)


def perplexity(loss: float, tokens: int) -> float:
    """Perplexity of a summed loss in nats."""
    return math.exp(loss / max(1, tokens))


@torch.no_grad()
def generate(model: Any, tokenizer: Any, prompts: list[str], length: int, seed: int) -> list[str]:
    """One sampled continuation (at most ``length`` tokens) of each rendered prompt."""
    torch.manual_seed(seed)
    tokenizer.padding_side = "left"
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    out = model.generate(**inputs, max_new_tokens=length)
    fresh = out[:, inputs["input_ids"].shape[1] :]
    return [str(text).strip() for text in tokenizer.batch_decode(fresh, skip_special_tokens=True)]
