"""Accounts for every tensor of a checkpoint: an expert's, the backbone's, or one stock ignores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from core.errors import CheckpointError
from expert_pool import transformers_private
from expert_pool.expert_layout import ExpertLayout
from expert_pool.safetensors_header import TensorEntry
from expert_pool.transformers_private import KeyMatcher, TargetSource

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import LayerSpec


def match_tensors(
    model: PreTrainedModel,
    saved_config: PretrainedConfig,
    tensors: dict[str, TensorEntry],
    layers: Sequence[LayerSpec],
    layouts: Sequence[ExpertLayout],
) -> dict[str, TensorEntry]:
    """Fills `layouts` with the experts' tensors and returns the backbone's by checkpoint name.

    Raises CheckpointError for a tensor that nobody reads, is missing or has the wrong shape.
    """
    matched, unread = KeyMatcher(model).match(tensors)
    owners = {
        f"{layer.module_name}.{param.name}": layout
        for layer, layout in zip(layers, layouts, strict=True)
        for param in layer.params
    }
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    backbone: dict[str, TensorEntry] = {}
    fed: set[str] = set()
    problems: list[str] = []
    for target, source in matched.items():
        outputs = source.outputs().values()
        fed.update(outputs)
        layout = owners.get(target)
        try:
            if layout is not None:
                layout.add(source, tensors)
                continue
            _check_backbone(model, expected, source, tensors)
        except CheckpointError as error:
            problems.append(str(error))
        for keys in source.keys.values():
            backbone.update((key, tensors[key]) for key in keys)
    if problems:
        more = f"\n... and {len(problems) - 4} more like these." if len(problems) > 4 else ""
        raise CheckpointError("\n".join(problems[:4]) + more)
    _refuse_unread(model, saved_config, unread, tensors)
    _refuse_missing(model, fed)
    return backbone


def _check_backbone(
    model: PreTrainedModel,
    expected: Mapping[str, torch.Size],
    source: TargetSource,
    tensors: Mapping[str, TensorEntry],
) -> None:
    """Runs the conversion on tensors without storage and compares shapes."""
    probe = {
        pattern: [torch.empty(tensors[key].shape, device="meta") for key in keys]
        for pattern, keys in source.keys.items()
    }
    if source.converter is None and len(probe[""]) > 1:
        raise CheckpointError(
            f"Several tensors claim to be {source.target}: {', '.join(source.keys[''])}."
        )
    found = ", ".join(
        f"{key} {list(tensors[key].shape)}" for keys in source.keys.values() for key in keys[:2]
    )
    try:
        results = source.convert(probe, model)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{source.target} cannot be made from {found}: {error}") from error
    for name, made in results.items():
        if name in expected and made.shape != expected[name]:
            raise CheckpointError(
                f"{name} should have the shape {list(expected[name])}, the checkpoint makes "
                f"{list(made.shape)} from {found}."
            )


def _refuse_unread(
    model: PreTrainedModel,
    saved_config: PretrainedConfig,
    unread: Mapping[str, str],
    tensors: Mapping[str, TensorEntry],
) -> None:
    ignored = transformers_private.may_be_unread(model)
    extra = [
        key
        for key, name in unread.items()
        if not (ignored is not None and (ignored.search(name) or ignored.search(key)))
    ]
    if extra and type(saved_config) is not type(model.config):
        whole = transformers_private.build_whole_meta_model(saved_config)
        if whole is not None:
            ignored = transformers_private.may_be_unread(whole)
            _, extra_by_name = KeyMatcher(whole).match(extra)
            extra = [k for k, n in extra_by_name.items() if not (ignored and ignored.search(n))]
    if extra:
        raise CheckpointError(
            f"{len(extra)} tensors of the checkpoint are read by nobody: "
            f"{', '.join(f'{key} {list(tensors[key].shape)}' for key in extra[:8])}"
            f"{' ...' if len(extra) > 8 else ''}. The model's configuration and its weights do "
            "not belong together."
        )


def _refuse_missing(model: PreTrainedModel, fed: set[str]) -> None:
    tied = transformers_private.tied_parameters(model)
    groups: dict[str, set[str]] = {}
    for name, other in tied.items():
        groups.setdefault(other, {other}).add(name)
    shared = {name: group for group in groups.values() for name in group}
    optional = transformers_private.may_be_missing(model)
    missing = [
        name
        for name in model.state_dict()
        if name not in fed
        and not (shared.get(name, set()) & fed)
        and not (optional is not None and optional.search(name))
    ]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no weights for {len(missing)} of the model's parameters: "
            f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}. It is incomplete: "
            "fetch it again."
        )
