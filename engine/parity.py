"""Compares a user's own weights with stock transformers, one decoder layer at a time.

Random tokens pass the stock model layer by layer. Each layer's weights are loaded by stock's rules
when its turn comes and dropped afterwards; before that, the same inputs pass the layer once more
with its experts served by an expert pool. So a checkpoint may be far larger than memory: one
layer's experts, half as many slots, and what lies outside the layers are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from core.errors import CheckpointError
from expert_pool import checkpoint_files, encodings, experts_forward, transformers_private
from expert_pool.checkpoint_index import CheckpointIndex, LayerSpec
from expert_pool.file_reader import FileReader
from expert_pool.part_loader import PartLoader
from expert_pool.pool import ExpertPool
from expert_pool.settings import PoolSettings

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference, as a share of the range of stock's outputs, that is rounding.

Where the pool runs the arithmetic of stock grouped_mm the difference is 0; Llama 4's stock code
multiplies in another order.
"""


@dataclass(frozen=True, slots=True)
class LayerParity:
    """One MoE layer compared in one dtype."""

    decoder_layer: int
    dtype: str
    num_experts: int
    experts_used: int
    """Experts that the tokens were routed to."""
    unequal_experts: int
    """Experts, of all, whose parameters are not bitwise stock's."""
    max_delta: float
    """Largest difference between two outputs of the layer."""
    output_range: float
    """Largest minus smallest output of the stock layer."""

    @property
    def passed(self) -> bool:
        """Equal parameters, and outputs within rounding (a NaN never passes)."""
        limit = _TOLERANCE[encodings.dtype_of(self.dtype)] * self.output_range
        return self.unequal_experts == 0 and self.max_delta <= limit


@dataclass(slots=True)
class _Twin:
    """Stock's model and the one whose experts come from a pool; layers have storage by turns."""

    index: CheckpointIndex
    stock: Any
    pooled: Any
    loader: PartLoader
    note: Callable[[LayerParity], None]


def check_parity(
    index: CheckpointIndex, note: Callable[[LayerParity], None], tokens: int = 64, seed: int = 0
) -> None:
    """Runs `tokens` random tokens through every layer, in the stored dtype and in fp32.

    `note` is given each MoE layer's result as soon as it is known. Raises CheckpointError where an
    expert cannot be read.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, index.shape.vocab_size, (1, tokens), generator=generator)
    indexes = [index]
    if index.dtype != torch.float32:
        indexes.append(CheckpointIndex.open(index.model_dir, "float32"))
    for each in indexes:
        with _open_twin(each, note) as twin, torch.inference_mode():
            _run(twin, ids)


@contextmanager
def _open_twin(index: CheckpointIndex, note: Callable[[LayerParity], None]) -> Iterator[_Twin]:
    experts_forward.register()
    build = partial(transformers_private.build_meta_model, index.config, index.dtype)
    stock = build(None, with_shims=False)
    pooled = build(experts_forward.IMPLEMENTATION)
    for layer in index.layers:
        module = pooled.get_submodule(layer.module_name)
        for param in layer.params:
            delattr(module, param.name)
    tensors = checkpoint_files.read_files(index.model_dir).tensors
    with ExitStack() as opened:
        files = [
            opened.enter_context(safe_open(path, framework="pt", backend="mmap"))
            for path in index.files
        ]

        def read(key: str) -> torch.Tensor:
            value: torch.Tensor = files[tensors[key].file].get_slice(key)[...]
            return value

        loader = PartLoader(stock, tensors, read, index.dtype)
        yield _Twin(index, stock, pooled, loader, note)


def _run(twin: _Twin, ids: torch.Tensor) -> torch.Tensor:
    """Streams `ids` through the layers; returns stock's last hidden states."""
    body = twin.stock.model
    specs = {layer.decoder_layer: layer for layer in twin.index.layers}
    twin.loader.load(lambda name: name.startswith("model.") and not _in_layers(name))
    for number, layer in enumerate(body.layers):
        layer.forward = partial(_stream, twin, number, specs.get(number), layer.forward)
    hidden: torch.Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def _in_layers(name: str) -> bool:
    return name.startswith("model.layers.")


def _stream(
    twin: _Twin,
    number: int,
    spec: LayerSpec | None,
    stock_forward: Callable[..., Any],
    hidden: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stands in for a decoder layer's forward: load, run, compare, drop."""
    prefix = f"model.layers.{number}."
    twin.loader.load(lambda name: name.startswith(prefix))
    layer = twin.stock.model.layers[number]
    before = hidden.clone()
    output = stock_forward(hidden, *args, **kwargs)
    if spec is not None:
        _share_backbone(layer, twin.pooled.model.layers[number])
        index = twin.index.only(spec.ordinal)
        expected = _first(output)
        with _attached_pool(index, twin.pooled) as pool:
            pool.begin_step()
            found = _first(twin.pooled.model.layers[number](before, *args, **kwargs))
            stats = pool.end_step()
            if stats.failed_rows or stats.bad_rows:
                raise CheckpointError(
                    f"decoder layer {number}: {len(stats.failed_rows)} tokens needed an expert "
                    f"that cannot be read, {len(stats.bad_rows)} were routed to NaN or nowhere."
                )
            used = int((pool.loads[0] > 0).sum())
        twin.pooled.model.layers[number].to("meta")
        twin.note(
            LayerParity(
                decoder_layer=number,
                dtype=encodings.name_of(twin.index.dtype),
                num_experts=spec.num_experts,
                experts_used=used,
                unequal_experts=_count_unequal(index, twin.stock.get_submodule(spec.module_name)),
                max_delta=float((found.float() - expected.float()).abs().max()),
                output_range=float(expected.float().max() - expected.float().min()),
            )
        )
    layer.to("meta")
    return output


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _share_backbone(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Gives `target` the tensors of `source` under the same names; it has no experts of its own."""
    for path, module in target.named_modules():
        twin = source.get_submodule(path)
        for name in module._parameters:
            module._parameters[name] = twin._parameters[name]
        for name in module._buffers:
            module._buffers[name] = twin._buffers[name]


@contextmanager
def _attached_pool(index: CheckpointIndex, model: torch.nn.Module) -> Iterator[ExpertPool]:
    """A pool of half the layer's experts, so that some are evicted and some are found."""
    (layer,) = index.layers
    slots = max(layer.top_k, layer.num_experts // 2)
    # Torch's kernels: what is compared is the model, and they compute what stock does bit by bit.
    settings = PoolSettings(
        expert_memory=slots * layer.slot_bytes, verify_checksums=False, kernel="torch"
    )
    pool = ExpertPool(index, settings)
    try:
        pool.attach(model)
        yield pool
    finally:
        pool.close()
        # The slots live as long as the module knows the pool.
        del model.get_submodule(layer.module_name).__dict__["_coterie"]


def _count_unequal(index: CheckpointIndex, experts: torch.nn.Module) -> int:
    (layer,) = index.layers
    reader = FileReader(index.files, direct=False)
    slot = torch.empty(layer.slot_bytes, dtype=torch.uint8)
    unequal = 0
    for expert in range(layer.num_experts):
        record = index.record(0, expert)
        pieces = [np.empty(piece.nbytes, dtype=np.uint8) for piece in record.pieces]
        for piece, into in zip(record.pieces, pieces, strict=True):
            reader.read(piece.file, piece.offset, into)
        index.assemble(record, [torch.from_numpy(piece) for piece in pieces], slot)
        unequal += not all(
            torch.equal(
                slot[param.slot_offset : param.slot_offset + param.nbytes],
                getattr(experts, param.name)[expert].contiguous().view(-1).view(torch.uint8),
            )
            for param in layer.params
        )
    reader.close()
    return unequal
