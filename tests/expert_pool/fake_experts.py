"""A checkpoint of random experts without a model around it, and experts modules to run it with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers.activations import ACT2FN
from transformers.integrations.moe import grouped_mm_experts_forward, use_experts_implementation

from core.model_shape import PARAM_ALIGN_BYTES, SLOT_ALIGN_BYTES, align_up
from expert_pool.checkpoint_index import ExpertRecord, LayerSpec, ParamSpec, Piece
from expert_pool.experts_forward import IMPLEMENTATION, register

KINDS = ("gated", "biased", "ungated")


@dataclass(frozen=True)
class FakeShape:
    num_layers: int = 2
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 64
    width: int = 32
    kind: str = "gated"
    dtype: str = "float32"
    transformed: bool = False
    """Bytes lie reversed in the file, so that `assemble` is needed."""

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        up = self.width * (1 if self.kind == "ungated" else 2)
        name = "up_proj" if self.kind == "ungated" else "gate_up_proj"
        if self.kind == "biased":  # as gpt_oss: transposed and with biases
            return {
                name: (self.hidden, up),
                f"{name}_bias": (up,),
                "down_proj": (self.width, self.hidden),
                "down_proj_bias": (self.hidden,),
            }
        return {name: (up, self.hidden), "down_proj": (self.hidden, self.width)}


class FakeIndex:
    """The interface of CheckpointIndex over files of random weights: one a layer."""

    def __init__(self, folder: Path, shape: FakeShape, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model_dir = folder
        self.content_key = self.layout_key = f"fake-{seed}"
        self.shape = shape
        dtype = getattr(torch, shape.dtype)
        params, offset = [], 0
        for name, dims in shape.param_shapes().items():
            nbytes = math.prod(dims) * dtype.itemsize
            params.append(ParamSpec(name, dims, shape.dtype, offset, nbytes))
            offset = align_up(offset + nbytes, PARAM_ALIGN_BYTES)
        self.layers = tuple(
            LayerSpec(
                ordinal=layer,
                decoder_layer=layer,
                module_name=f"layers.{layer}",
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                params=tuple(params),
                slot_bytes=align_up(offset, SLOT_ALIGN_BYTES),
            )
            for layer in range(shape.num_layers)
        )
        self.record_bytes = sum(param.nbytes for param in params)
        self.files = tuple(folder / f"layer{layer}.bytes" for layer in range(shape.num_layers))
        generator = torch.Generator().manual_seed(seed)
        self.weights: list[dict[str, torch.Tensor]] = []
        for path in self.files:
            weights = {
                p.name: (torch.randn(shape.num_experts, *p.shape, generator=generator) / 8).to(
                    dtype
                )
                for p in params
            }
            self.weights.append(weights)
            with path.open("wb") as stream:
                stream.write(b"headers!")
                for expert in range(shape.num_experts):
                    for param in reversed(params):
                        raw = weights[param.name][expert].contiguous().view(torch.uint8).numpy()
                        raw = raw.reshape(-1)
                        stream.write((raw[::-1] if shape.transformed else raw).tobytes())

    def record(self, ordinal: int, expert: int) -> ExpertRecord:
        offset = 8 + expert * self.record_bytes
        pieces = []
        for param in reversed(self.layers[ordinal].params):
            pieces.append(Piece(ordinal, offset, param.nbytes))
            offset += param.nbytes
        return ExpertRecord(ordinal, expert, tuple(pieces), self.record_bytes)

    def placement(self, ordinal: int) -> tuple[tuple[int, int], ...] | None:
        if self.shape.transformed:
            return None
        params = self.layers[ordinal].params
        return tuple((len(params) - 1 - at, p.slot_offset) for at, p in enumerate(params))

    def assemble(self, record: ExpertRecord, raw: list[torch.Tensor], slot: torch.Tensor) -> None:
        for param, piece in zip(reversed(self.layers[record.ordinal].params), raw, strict=True):
            slot[param.slot_offset : param.slot_offset + param.nbytes] = piece.flip(0)

    def piece_bytes(self, piece: Piece) -> bytes:
        with self.files[piece.file].open("rb") as stream:
            stream.seek(piece.offset)
            return stream.read(piece.nbytes)


@use_experts_implementation()
class _Gated(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.act_fn = ACT2FN["silu"]
        self.num_experts = config.num_experts

    def forward(self, hidden, index, weights):
        raise NotImplementedError


@use_experts_implementation(is_concatenated=False, is_transposed=True, has_bias=True)
class _Biased(_Gated):
    def _apply_gate(self, gate_up):
        gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@use_experts_implementation(has_gate=False)
class _Ungated(_Gated):
    pass


class FakeModel(torch.nn.Module):
    """The experts modules of all layers of an index, as a model would hold them."""

    def __init__(self, index: FakeIndex) -> None:
        super().__init__()
        register()
        self.index = index
        kind = {"gated": _Gated, "biased": _Biased, "ungated": _Ungated}[index.shape.kind]
        config = SimpleNamespace(
            num_experts=index.shape.num_experts, _experts_implementation=IMPLEMENTATION
        )
        self.layers = torch.nn.ModuleList(kind(config) for _ in index.layers)

    def stock(self, layer: int, hidden, index, weights) -> torch.Tensor:
        """The layer's output by transformers' own grouped_mm."""
        module = self.layers[layer]
        for name, weight in self.index.weights[layer].items():
            setattr(module, name, weight)
        try:
            return grouped_mm_experts_forward(module, hidden, index, weights)
        finally:
            for name in self.index.weights[layer]:
                delattr(module, name)


def random_routing(
    shape: FakeShape, rows: int, seed: int, weight_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden [T,H], index [T,K], weights [T,K]) with distinct experts a row, some more popular."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    hidden = torch.randn(rows, shape.hidden, generator=generator).to(dtype)
    popularity = torch.randn(shape.num_experts, generator=generator)
    logits = torch.randn(rows, shape.num_experts, generator=generator) + popularity
    weights, index = logits.softmax(-1).topk(shape.top_k, dim=-1)
    return hidden, index, weights.to(weight_dtype or dtype)


class FaultyReader:
    """Reads the files; `faults` says by (layer, expert) what goes wrong with the next reads."""

    def __init__(self, index: FakeIndex) -> None:
        self.index = index
        self.faults: dict[tuple[int, int], list[str]] = {}
        self.reads: list[tuple[int, int]] = []

    def read(self, file: int, offset: int, into: np.ndarray) -> None:
        at, within = divmod(offset - 8, self.index.record_bytes)
        if within == 0:
            self.reads.append((file, at))
        with self.index.files[file].open("rb", buffering=0) as stream:
            stream.seek(offset)
            if stream.readinto(into) != into.size:
                raise OSError("short read")
        last = within + into.size == self.index.record_bytes
        faults = self.faults.get((file, at))
        if faults and last:
            fault = faults.pop(0)
            if fault == "flip":
                into[into.size // 2] ^= 1
            elif fault == "error":
                raise OSError(5, "Input/output error")

    def close(self) -> None:
        pass
