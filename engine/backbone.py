"""The backbone: transformers' own model code with everything but the experts loaded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch
from safetensors import safe_open

from core.errors import CheckpointError, SettingsError
from core.model_shape import ModelShape
from engine.eos_ids import read_eos_ids
from engine.rope import fix_rope_factors, stretch_factor
from expert_pool import experts_forward, transformers_private
from expert_pool.checkpoint_index import CheckpointIndex

_STATE_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})
"""Layer types that carry a recurrent or convolution state from token to token."""

_WHOLE_PROMPT_ONLY = frozenset({"jamba"})
"""Families whose stock code forgets its state in a second chunk of more than one token."""


class Experts(Protocol):
    """What serves the experts of a backbone: an ExpertPool, or a stand-in in tests."""

    row_offset: int
    """Row of the step's flattened batch that the next forward call begins with."""

    def attach(self, model: torch.nn.Module) -> None:
        """Marks the model's experts modules, so that their calls find their experts."""


class Backbone:
    """A causal language model without experts, and what the engine must know about it."""

    def __init__(
        self, model: Any, index: CheckpointIndex, experts: Experts, context_tokens: int
    ) -> None:
        self.model = model
        self.index = index
        self.experts = experts
        self.shape: ModelShape = index.shape
        self.context_tokens = context_tokens
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.eos_ids = read_eos_ids(index.model_dir, index.shape.vocab_size)
        self.state_family = has_state_layers(model.config)
        """Runs on its own stock cache a sequence: no paged attention, no prefix reuse."""
        self.whole_prompt_only = model.config.model_type in _WHOLE_PROMPT_ONLY
        """A prompt must pass in one part; a second long part would lose the first one's state."""

    @classmethod
    def open(
        cls,
        index: CheckpointIndex,
        experts: Experts,
        device: str = "cpu",
        context_tokens: int | None = None,
        attention: str | None = None,
    ) -> Backbone:
        """Loads the backbone of `index` in its dtype and attaches `experts` to it.

        `context_tokens` is the longest sequence served, None the model's own limit; RoPE factors
        that depend on length are fixed by it here. `attention` names a registered attention
        function, None is transformers' choice. Raises CheckpointError where a parameter has no
        weights, SettingsError where the context is longer than the model allows.
        """
        context_tokens = _check_context(index, context_tokens)
        experts_forward.register()
        model = transformers_private.build_meta_model(
            index.config, index.dtype, experts_forward.IMPLEMENTATION, attn_implementation=attention
        )
        _drop_experts(model, index)
        with ExitStack() as files:
            transformers_private.load_weights(
                model, _lazy_tensors(index, files), index.dtype, device
            )
            _own_memory(model)
        _check_loaded(model)
        model.requires_grad_(False).eval()
        fix_rope_factors(model, context_tokens)
        experts.attach(model)
        return cls(model, index, experts, context_tokens)


def has_state_layers(config: Any) -> bool:
    """True where a layer keeps a state that only its own sequence may touch."""
    text = config.get_text_config(decoder=True)
    return bool(_STATE_LAYERS.intersection(getattr(text, "layer_types", None) or ()))


def _check_context(index: CheckpointIndex, context_tokens: int | None) -> int:
    own = index.shape.context_limit_tokens
    if context_tokens is None:
        return own
    limit = int(own * stretch_factor(index.config))
    if not 1 <= context_tokens <= limit:
        raise SettingsError(
            f"engine.context_tokens must lie between 1 and the model's limit of {limit} tokens, "
            f"found {context_tokens}."
        )
    return context_tokens


def _drop_experts(model: torch.nn.Module, index: CheckpointIndex) -> None:
    for layer in index.layers:
        module = model.get_submodule(layer.module_name)
        for param in layer.params:
            delattr(module, param.name)
        # Keeps transformers from drawing initial values for what was just taken away.
        module._is_hf_initialized = True  # type: ignore[assignment]


def _lazy_tensors(index: CheckpointIndex, files: ExitStack) -> dict[str, Any]:
    opened = {
        number: files.enter_context(safe_open(index.files[number], framework="pt"))
        for number in sorted({entry.file for entry in index.backbone.values()})
    }
    return {key: opened[entry.file].get_slice(key) for key, entry in index.backbone.items()}


def _own_memory(model: torch.nn.Module) -> None:
    """Copies what may be a mapping of the checkpoint's files, one tensor after another.

    A file that is cut short or changed under a running server would kill the process at the next
    touch of a page, or change its answers.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()


def _check_loaded(model: torch.nn.Module) -> None:
    empty = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if empty:
        raise CheckpointError(
            f"These parts of the backbone got no weights: {', '.join(empty[:8])}. "
            "The checkpoint does not fit the model code of this transformers version."
        )
