"""The one file that touches private parts of transformers (5.24): names, conversions, loading.

transformers renames and converts checkpoint tensors while it loads them. Coterie asks the same
code which checkpoint tensor feeds which parameter, and lets it load the backbone, so that an
original checkpoint is read exactly as stock `from_pretrained` would read it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from core.errors import CheckpointError
from expert_pool.families import SUPPORTED
from expert_pool.shims import llama4

_COMPOSITE_TEXT = "model.language_model."
"""Where composite models keep their text model."""


def load_config(model_dir: Path) -> PretrainedConfig:
    """The configuration in `model_dir`, never with remote code. Raises CheckpointError."""
    try:
        return AutoConfig.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    # A configuration's classes check its values in ways of their own: whatever they raise, they
    # refused it.
    except Exception as error:
        raise CheckpointError(
            f"{model_dir / 'config.json'} is not a configuration that transformers knows without "
            f"running code from the model's folder, which Coterie never does. It says: {error}"
        ) from error


def build_meta_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    experts_implementation: str | None,
    attn_implementation: str | None = None,
    with_shims: bool = True,
) -> PreTrainedModel:
    """The causal language model of `config` without storage, with shims in place.

    A composite configuration (text with vision or audio) gives its text model alone.
    `experts_implementation` must be registered in transformers' ALL_EXPERTS_FUNCTIONS; None is
    stock's own choice. `with_shims=False` leaves the model as stock has it.
    """
    kwargs: dict[str, Any] = {"dtype": dtype}
    if experts_implementation is not None:
        kwargs["experts_implementation"] = experts_implementation
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    try:
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(_text_part(config), **kwargs)
    # Model code meets values that make no sense in ways of its own.
    except Exception as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"transformers cannot make a causal language model of model_type "
            f"{config.model_type!r} from this configuration: {said} "
            f"Supported model types: {', '.join(SUPPORTED)}."
        ) from error
    if with_shims:
        llama4.install(model)
    return model.eval()


def _text_part(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of `config`, or of its text configuration where that has a language model."""
    text = config.get_text_config(decoder=True)
    return copy.deepcopy(text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config)


def _conversions(model: PreTrainedModel) -> list[WeightRenaming | WeightConverter]:
    """Stock's conversions, after which a text model finds its tensors inside a composite's."""
    composite = any(name.startswith(_COMPOSITE_TEXT) for name in model.state_dict())
    mapping = None if composite else {"^" + re.escape(_COMPOSITE_TEXT): "model."}
    return get_model_conversion_mapping(model, key_mapping=mapping)


def build_whole_meta_model(config: PretrainedConfig) -> PreTrainedModel | None:
    """The multimodal model that a composite `config` was saved from, without storage, if known."""
    import transformers

    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        if model_class is not None and getattr(model_class, "config_class", None) is type(config):
            with torch.device("meta"), no_init_weights():
                return model_class._from_config(copy.deepcopy(config))
    return None


def experts_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The modules that transformers' experts interface dispatches, by name, in model order."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "has_gate")
    }


@dataclass(slots=True)
class TargetSource:
    """Which checkpoint tensors feed one parameter (or, through a converter, several).

    `keys` holds, for each source pattern of the converter, the checkpoint keys in the order in
    which stock collects them; a plain renaming has one key under the pattern "".
    """

    target: str
    converter: WeightConverter | None
    keys: dict[str, list[str]] = field(default_factory=dict)

    def outputs(self) -> dict[str, str]:
        """Full parameter name of each target pattern of the converter (of "" where none)."""
        if self.converter is None:
            return {"": self.target}
        first = self.converter.target_patterns[0]
        return {
            pattern: self.target.replace(first, pattern)
            for pattern in self.converter.target_patterns
        }

    def convert(
        self, tensors: dict[str, list[torch.Tensor]], model: PreTrainedModel | None
    ) -> dict[str, torch.Tensor]:
        """Runs the converter's operations as stock does; returns by full parameter name.

        `tensors` holds a list for each source pattern, already in the parameter's dtype.
        """
        if self.converter is None:
            return {self.target: tensors[""][0]}
        values: dict[str, Any] = dict(tensors)
        for operation in self.converter.operations:
            values = operation.convert(
                values,
                source_patterns=self.converter.source_patterns,
                target_patterns=self.converter.target_patterns,
                full_layer_name=self.target,
                model=model,
                config=None if model is None else model.config,
                missing_keys=None,
            )
        names = self.outputs()
        return {
            names.get(pattern, pattern): value[0] if isinstance(value, list) else value
            for pattern, value in values.items()
        }


class KeyMatcher:
    """Says which parameter of a meta model a checkpoint key feeds, as stock's loader decides it.

    Experts are numerous and their names regular: a name is matched once for all numbers in its
    last numbered place, where the number does not change the outcome.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._prefix: str = model.base_model_prefix
        self._meta: dict[str, torch.Tensor] = dict(model.state_dict())
        mapping = _conversions(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {k: c for c in self._converters for k in c.source_patterns}
        self._by_template: dict[str, tuple[str, str | None] | None] = {}

    def match(self, keys: Iterable[str]) -> tuple[dict[str, TargetSource], dict[str, str]]:
        """Sources by target, and the keys that feed nothing with the name they were given."""
        matched: dict[str, TargetSource] = {}
        unread: dict[str, str] = {}
        for key in sorted(keys, key=dot_natural_key):
            target, pattern = self._rename(key)
            if target not in self._meta:
                unread[key] = target
                continue
            source = matched.get(target)
            if source is None:
                converter = None if pattern is None else self._by_pattern[pattern]
                source = matched[target] = TargetSource(target, converter)
            source.keys.setdefault(pattern or "", []).append(key)
        return matched, unread

    def _rename(self, key: str) -> tuple[str, str | None]:
        parts = key.split(".")
        place = next((i for i in reversed(range(len(parts))) if parts[i].isdigit()), None)
        if place is None:
            return self._rename_one(key)
        number = parts[place]
        parts[place] = "*"
        template = ".".join(parts)
        if template not in self._by_template:
            parts[place] = str(int(number) + 1)
            one, other = self._rename_one(key), self._rename_one(".".join(parts))
            same = one == other and one[1] is not None
            self._by_template[template] = one if same else None
        return self._by_template[template] or self._rename_one(key)

    def _rename_one(self, key: str) -> tuple[str, str | None]:
        renamed, pattern = rename_source_key(
            key, self._renamings, self._converters, self._prefix, self._meta
        )
        if renamed not in self._meta and key in self._meta:
            renamed, pattern = rename_source_key(key, [], [], self._prefix, self._meta)
        return renamed, pattern


def _any_of(patterns: Iterable[str]) -> re.Pattern[str] | None:
    joined = "|".join(f"({pattern})" for pattern in patterns)
    return re.compile(joined) if joined else None


def may_be_unread(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Names that stock drops in silence: next-token-prediction layers, old rotary buffers."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return _any_of(sorted(patterns))


def may_be_missing(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Parameters that stock makes itself when a checkpoint lacks them."""
    return _any_of(sorted(model._keys_to_ignore_on_load_missing or ()))


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Parameter name -> the name of the parameter that it shares its storage with."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def parameter_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype that stock loads each parameter and buffer in, for a model loaded in `dtype`."""
    plan = model._get_dtype_plan(dtype)
    if plan:
        search, group_names, _ = build_glob_alternation(list(plan))
    dtypes = {}
    for name, tensor in model.state_dict().items():
        match = search.search(name) if plan else None
        dtypes[name] = tensor.dtype if match is None else plan[group_names[match.lastgroup]]
    return dtypes


def make_buffers(model: PreTrainedModel, module: torch.nn.Module, names: Iterable[str]) -> None:
    """Gives the named buffers of a meta model's `module` storage and the values stock gives them.

    Parameters of the module that were marked by `mark_loaded` keep theirs.
    """
    for name in names:
        module._buffers[name] = torch.empty_like(module.get_buffer(name), device="cpu")
    model._init_weights(module)


def mark_loaded(tensor: torch.Tensor) -> None:
    """Keeps transformers from drawing initial values for a tensor."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def load_weights(
    model: PreTrainedModel,
    tensors: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> None:
    """Loads checkpoint `tensors` into a meta `model` as `from_pretrained(dtype=dtype)` does.

    `tensors` maps original checkpoint keys to tensors or to lazy slices of safetensors' safe_open.
    Parameters that are to stay without storage must have been deleted from the model before. Ties
    weights and makes buffers. Raises CheckpointError when a parameter remains without weights or a
    conversion fails.
    """
    config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        device_map={"": torch.device(device)},
        weight_mapping=_conversions(model),
    )
    info, _ = model._load_pretrained_model(model, dict(tensors), None, config)
    tied = tied_parameters(model)
    optional = may_be_missing(model)
    missing = sorted(
        name
        for name in info.missing_keys
        if name not in tied
        and name not in tied.values()
        and not (optional is not None and optional.search(name))
    )
    wrong = [*missing, *sorted(map(str, info.mismatched_keys)), *sorted(info.conversion_errors)]
    if wrong or info.error_msgs:
        raise CheckpointError(
            f"These parameters of the backbone could not be loaded: {', '.join(wrong[:8])} "
            f"{'; '.join(map(str, info.error_msgs[:3]))}"
        )
    model._finalize_model_loading(model, config, info)
