"""The index over an original checkpoint: which bytes of which file make which expert.

Nothing is copied and no tensor is loaded: headers are read, names are matched to the model's
parameters by transformers' own rules, and every tensor is accounted for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from core.errors import CheckpointError
from core.model_shape import PARAM_ALIGN_BYTES, SLOT_ALIGN_BYTES, ModelShape, align_up
from expert_pool import checkpoint_files, encodings, model_probe, transformers_private
from expert_pool.expert_layout import ExpertLayout
from expert_pool.families import SUPPORTED
from expert_pool.safetensors_header import TensorEntry
from expert_pool.tensor_matching import match_tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes in one safetensors file."""

    file: int
    """Position in CheckpointIndex.files."""
    offset: int
    """Absolute byte offset in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of one expert, as the experts module sees `param[e]`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch dtype name that is computed with, such as "bfloat16"."""
    slot_offset: int
    """Bytes from the start of the slot, a multiple of PARAM_ALIGN_BYTES."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One MoE layer: its experts module and what a slot for one of its experts holds."""

    ordinal: int
    decoder_layer: int
    module_name: str
    num_experts: int
    top_k: int
    params: tuple[ParamSpec, ...]
    slot_bytes: int

    def projection_values(self) -> tuple[int, int]:
        """Values of one expert's up (gate and up) and down projections."""
        values = {param.name: math.prod(param.shape) for param in self.params}
        return values.get("gate_up_proj") or values["up_proj"], values["down_proj"]


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """The bytes of one expert in the checkpoint."""

    ordinal: int
    expert: int
    pieces: tuple[Piece, ...]
    nbytes: int
    """Sum of the pieces."""


class CheckpointIndex:
    """An open checkpoint. Immutable; safe to use from several threads."""

    def __init__(
        self,
        files: checkpoint_files.CheckpointFiles,
        config: PretrainedConfig,
        dtype: torch.dtype,
        layers: Sequence[LayerSpec],
        layouts: Sequence[ExpertLayout],
        backbone: Mapping[str, TensorEntry],
        shape: ModelShape,
    ) -> None:
        self.model_dir: Path = files.model_dir
        self.files: tuple[Path, ...] = files.files
        self.config = config
        """The text model's configuration, without an experts implementation chosen."""
        self.dtype = dtype
        """The dtype that the model is loaded and computed in (some parameters stay in fp32)."""
        self.layers = tuple(layers)
        self.backbone = backbone
        """Every checkpoint tensor that the backbone reads, by its checkpoint name."""
        self.shape = shape
        self.content_key = checkpoint_files.sampled_key(files)
        """Names the model by its content: configuration, headers, and samples of all data."""
        self.layout_key = checkpoint_files.sampled_key(files, backbone)
        """The same with samples of the backbone alone: damage to an expert leaves it as it is."""
        self._layouts = tuple(layouts)

    @classmethod
    def open(cls, model_dir: Path | str, dtype: str | None = None) -> CheckpointIndex:
        """Indexes the checkpoint in `model_dir`, to be computed in `dtype` (None: as stored).

        Raises CheckpointError, naming it, for anything missing, misshapen, unread or unsupported.
        """
        model_dir = Path(model_dir)
        files = checkpoint_files.read_files(model_dir)
        saved = transformers_private.load_config(model_dir)
        chosen = _choose_dtype(saved, files.tensors, dtype)
        model_probe.register_recorder()
        model = transformers_private.build_meta_model(
            saved, chosen, model_probe.RECORDER_NAME, "eager"
        )
        modules = transformers_private.experts_modules(model)
        if not modules:
            raise CheckpointError(
                f"{model_dir} is a {saved.model_type!r} model without experts that can be pooled: "
                "it is dense, or its experts do not use transformers' experts interface. "
                f"Supported model types: {', '.join(SUPPORTED)}."
            )
        dtypes = transformers_private.parameter_dtypes(model, chosen)
        specs = _expert_params(modules, dtypes)
        probe = model_probe.probe(model, modules)
        layers, layouts = [], []
        for ordinal, (name, params) in enumerate(specs.items()):
            end = params[-1].slot_offset + params[-1].nbytes
            num_experts = _num_experts(modules[name])
            layers.append(
                LayerSpec(
                    ordinal=ordinal,
                    decoder_layer=model_probe.decoder_layer(name),
                    module_name=name,
                    num_experts=num_experts,
                    top_k=probe.top_k[name],
                    params=params,
                    slot_bytes=align_up(end, SLOT_ALIGN_BYTES),
                )
            )
            layouts.append(ExpertLayout(name, num_experts, params))
        backbone = match_tensors(model, saved, files.tensors, layers, layouts)
        shape = model_probe.model_shape(model, layers, probe, chosen)
        return cls(files, _text_config(saved, model), chosen, layers, layouts, backbone, shape)

    def only(self, ordinal: int) -> CheckpointIndex:
        """The same checkpoint with one MoE layer alone, which becomes layer 0."""
        one = copy.copy(self)
        one.layers = (replace(self.layers[ordinal], ordinal=0),)
        one._layouts = (self._layouts[ordinal],)
        return one

    def record(self, ordinal: int, expert: int) -> ExpertRecord:
        """The pieces of one expert, made on demand."""
        layout = self._layouts[ordinal]
        if not 0 <= expert < layout.num_experts:
            raise IndexError(f"layer {ordinal} has experts 0..{layout.num_experts - 1}: {expert}")
        pieces = tuple(Piece(*location) for location in layout.pieces(expert))
        return ExpertRecord(ordinal, expert, pieces, layout.record_bytes)

    def placement(self, ordinal: int) -> tuple[tuple[int, int], ...] | None:
        """(piece, slot offset) where each piece may be read straight into a slot.

        None where the bytes must be transformed by `assemble`.
        """
        return self._layouts[ordinal].placement

    def assemble(
        self, record: ExpertRecord, raw: Sequence[torch.Tensor], slot: torch.Tensor
    ) -> None:
        """Writes the parameters of `record` into `slot` (uint8 [slot_bytes]).

        `raw` holds one uint8 tensor for each piece. Casts and conversions are stock's own.
        """
        self._layouts[record.ordinal].assemble(raw, slot)


def _text_config(saved: PretrainedConfig, model: PreTrainedModel) -> PretrainedConfig:
    """The configuration as loaded, of the class that the text model is built from."""
    config = saved if type(saved) is type(model.config) else saved.get_text_config(decoder=True)
    return copy.deepcopy(config)


def _choose_dtype(
    config: PretrainedConfig, tensors: Mapping[str, TensorEntry], dtype: str | None
) -> torch.dtype:
    if dtype is None:
        stored = config.dtype or getattr(config.get_text_config(), "dtype", None)
        if stored is None:
            found = (entry.encoding for entry in tensors.values() if "float" in entry.encoding)
            stored = next(found, "float32")
        dtype = encodings.name_of(stored) if isinstance(stored, torch.dtype) else str(stored)
    if dtype not in encodings.COMPUTE_DTYPES:
        raise CheckpointError(
            f"The model cannot be computed in {dtype!r}; expected one of "
            f"{', '.join(encodings.COMPUTE_DTYPES)}."
        )
    return encodings.dtype_of(dtype)


def _num_experts(module: torch.nn.Module) -> int:
    return int(next(module.parameters(recurse=False)).shape[0])


def _expert_params(
    modules: Mapping[str, torch.nn.Module], dtypes: Mapping[str, torch.dtype]
) -> dict[str, tuple[ParamSpec, ...]]:
    """What a slot holds, by experts module: every parameter [E, ...] of the module itself."""
    specs = {}
    for module_name, module in modules.items():
        params, offset = [], 0
        for name, parameter in module.named_parameters(recurse=False):
            dtype = dtypes[f"{module_name}.{name}"]
            shape = tuple(parameter.shape[1:])
            if parameter.shape[0] != _num_experts(module):
                raise CheckpointError(
                    f"{module_name}.{name} has the shape {list(parameter.shape)}; expected its "
                    f"first dimension to count {_num_experts(module)} experts."
                )
            nbytes = math.prod(shape) * dtype.itemsize
            params.append(ParamSpec(name, shape, encodings.name_of(dtype), offset, nbytes))
            offset = align_up(offset + nbytes, PARAM_ALIGN_BYTES)
        specs[module_name] = tuple(params)
    return specs
