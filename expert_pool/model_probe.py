"""Learns a model's shape by running it once without storage, never from configuration names.

A forward pass on the meta device shows what each experts module is asked (top_k) and what each
attention layer puts into its cache (heads and sizes of keys and values).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from core.errors import CheckpointError
from core.model_shape import KvLayerShape, ModelShape, MoeLayerShape
from expert_pool.transformers_private import tied_parameters

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import LayerSpec

RECORDER_NAME = "coterie_shape_probe"
_SEEN = "_coterie_experts_per_token"
_PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """What the pass saw."""

    top_k: dict[str, int]
    """Experts that a token uses, by the name of the experts module."""
    kv: dict[int, KvLayerShape]
    """What each decoder layer keeps in its cache (of MLA: the latent and its rotary part)."""


def register_recorder() -> None:
    """Registers the experts function that records top_k and computes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(RECORDER_NAME, _record)


def _record(
    module: torch.nn.Module,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    seen = module.__dict__.get(_SEEN, 0)
    module.__dict__[_SEEN] = seen + top_k_index.numel() // _PROBE_TOKENS
    return torch.empty_like(hidden)


def probe(model: PreTrainedModel, modules: Mapping[str, torch.nn.Module]) -> Probe:
    """Runs `model` (on the meta device, built with RECORDER_NAME) over two tokens, once.

    Raises CheckpointError when the model cannot run without storage.
    """
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), _NoValues():
            cache = model(input_ids=ids, use_cache=True).cache
    # Model code meets values that make no sense in ways of its own.
    except Exception as error:
        raise CheckpointError(
            f"The shape of a {model.config.model_type} model cannot be learned: a pass without "
            f"storage failed with {error!r}."
        ) from error
    uncalled = [name for name, module in modules.items() if _SEEN not in module.__dict__]
    if uncalled:
        raise CheckpointError(
            f"The model never calls its experts {', '.join(uncalled[:4])}; expected every experts "
            "module to run in a forward pass."
        )
    top_k = {name: int(module.__dict__.pop(_SEEN)) for name, module in modules.items()}
    kv = {
        number: KvLayerShape(
            decoder_layer=number,
            kv_heads=layer.keys.shape[1],
            key_dim=layer.keys.shape[-1],
            value_dim=layer.values.shape[-1],
            window_tokens=getattr(layer, "sliding_window", None),
        )
        for number, layer in enumerate(cache.layers)
        if isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.dim() == 4
    }
    _add_shared_layers(model, kv)
    return Probe(top_k, kv)


class _NoValues(TorchFunctionMode):
    """Reads any value of a tensor without storage as zero: rotary code asks how long the input is.

    Every shape stays what it is; only branches on values take the side of zero.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS and args[0].is_meta:
            return _READS[func](0)
        return func(*args, **(kwargs or {}))


_READS: dict[Any, Callable[[int], Any]] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__float__: float,
    torch.Tensor.item: int,
}


def _add_shared_layers(model: PreTrainedModel, kv: dict[int, KvLayerShape]) -> None:
    """Adds the layers that read the keys and values of the last earlier layer of their type."""
    stored: dict[str, int] = {}
    for module in model.modules():
        layer, layer_type = getattr(module, "layer_idx", None), getattr(module, "layer_type", "")
        if not isinstance(layer, int):
            continue
        if layer in kv:
            stored[layer_type] = layer
        elif getattr(module, "is_kv_shared_layer", False) and layer_type in stored:
            source = kv[stored[layer_type]]
            kv[layer] = msgspec.structs.replace(
                source, decoder_layer=layer, shares_layer=source.decoder_layer
            )


def decoder_layer(module_name: str) -> int:
    """The first number in a module's name: its place among the decoder layers."""
    return next(int(part) for part in module_name.split(".") if part.isdigit())


def model_shape(
    model: PreTrainedModel, layers: Sequence[LayerSpec], probe: Probe, dtype: torch.dtype
) -> ModelShape:
    """The numbers of a model whose experts are described by `layers`.

    Raises CheckpointError for a configuration with which no token could be computed.
    """
    context_tokens = model.config.max_position_embeddings
    least = min([context_tokens, *(layer.top_k for layer in layers)])
    if least < 1:
        raise CheckpointError(
            f"Expected a context and experts of a token of at least 1 in config.json, found "
            f"max_position_embeddings {context_tokens} and top_k "
            f"{', '.join(str(top_k) for top_k in sorted({layer.top_k for layer in layers}))}."
        )
    moe_layers = tuple(
        MoeLayerShape(
            ordinal=layer.ordinal,
            decoder_layer=layer.decoder_layer,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            expert_params=sum(math.prod(param.shape) for param in layer.params),
            expert_bytes=sum(param.nbytes for param in layer.params),
            slot_bytes=layer.slot_bytes,
        )
        for layer in layers
    )
    pooled = {f"{layer.module_name}.{param.name}" for layer in layers for param in layer.params}
    tied = tied_parameters(model)
    parameters = {name: p for name, p in model.named_parameters() if name not in tied}
    config = model.config
    return ModelShape(
        model_type=config.model_type,
        hidden_size=model.get_input_embeddings().weight.shape[1],
        vocab_size=model.get_output_embeddings().weight.shape[0],
        num_layers=config.num_hidden_layers,
        context_limit_tokens=context_tokens,
        dtype_bytes=dtype.itemsize,
        total_params=sum(parameter.numel() for parameter in parameters.values()),
        backbone_bytes=sum(
            parameter.numel() * parameter.itemsize
            for name, parameter in parameters.items()
            if name not in pooled
        ),
        moe_layers=moe_layers,
        kv_layers=tuple(probe.kv[layer] for layer in sorted(probe.kv)),
    )
