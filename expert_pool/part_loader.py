"""Loads one part of a model after another, for checkpoints that do not fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from transformers import PreTrainedModel

from expert_pool.transformers_private import (
    KeyMatcher,
    make_buffers,
    mark_loaded,
    parameter_dtypes,
)


class PartLoader:
    """Loads parts of a meta model from a checkpoint and lets them go again.

    Tensors are cast and converted, and buffers made, as stock does. What was loaded is let go by
    `module.to("meta")`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        keys: Iterable[str],
        read: Callable[[str], torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        """`read` returns the tensor of a checkpoint key, in a memory of its own."""
        self._model = model
        self._read = read
        self._sources, _ = KeyMatcher(model).match(keys)
        self._dtypes = parameter_dtypes(model, dtype)

    def load(self, wanted: Callable[[str], bool]) -> None:
        """Loads the parameters and makes the buffers whose full names are `wanted`."""
        for target, source in self._sources.items():
            if not any(wanted(name) for name in source.outputs().values()):
                continue
            dtype = self._dtypes[target]
            tensors = {
                pattern: [self._read(key).to(dtype) for key in keys]
                for pattern, keys in source.keys.items()
            }
            for name, tensor in source.convert(tensors, self._model).items():
                self._set(name, tensor)
        for prefix, module in self._model.named_modules():
            unmade = [
                name
                for name, buffer in module.named_buffers(recurse=False)
                if buffer.is_meta and wanted(f"{prefix}.{name}")
            ]
            if unmade:
                make_buffers(self._model, module, unmade)

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
            setattr(module, leaf, tensor)
        mark_loaded(tensor)
