"""Checks a model and its memory before anything starts: `python -m app.preflight` is the child.

The child imports torch and dies with it, so the command line stays small beside Ray.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from app.settings import Settings
from core import errors
from core.config_model import format_bytes
from core.errors import BudgetError, CoterieError
from core.model_shape import ModelShape
from engine.settings import EngineSettings


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that can be served, in numbers. All sizes in bytes."""

    shape: ModelShape
    slots_by_layer: tuple[int, ...]
    slots_bytes: int
    kv_bytes: int
    scratch_bytes: int
    available_bytes: int
    device: str

    @property
    def need_bytes(self) -> int:
        """What one rank reserves and loads."""
        return self.shape.backbone_bytes + self.slots_bytes + self.kv_bytes + self.scratch_bytes


class _Refused(msgspec.Struct):
    error: str
    message: str


class PreflightProcess:
    """The check under way in a child, while the parent does something else."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "app.preflight", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._input = settings.model_dump_json().encode()

    def result(self) -> Preflight:
        """Waits for it. Raises CheckpointError, BudgetError or whatever the check raised."""
        out, err = self._child.communicate(self._input)
        if self._child.returncode == 0:
            return msgspec.json.decode(out, type=Preflight)
        try:
            refused = msgspec.json.decode(out, type=_Refused)
        except msgspec.DecodeError:
            said = err.decode(errors="replace").strip()
            raise CoterieError(f"the check of the model failed: {said}") from None
        kind = getattr(errors, refused.error, CoterieError)
        raise kind(refused.message)


def check_model(settings: Settings, folder: Path) -> Preflight:
    """Indexes the checkpoint and compares what a rank needs with what the device has.

    Raises CheckpointError and BudgetError. Imports torch.
    """
    from expert_pool.checkpoint_index import CheckpointIndex
    from expert_pool.settings import expert_memory_bytes
    from expert_pool.slots import share_out

    wanted = settings.engine.dtype
    index = CheckpointIndex.open(folder, None if wanted == "auto" else wanted)
    granted = expert_memory_bytes(settings.pool.expert_memory, index.shape.all_experts_bytes)
    slots = share_out(index.layers, granted)
    plan = Preflight(
        shape=index.shape,
        slots_by_layer=tuple(slots),
        slots_bytes=sum(n * layer.slot_bytes for n, layer in zip(slots, index.layers, strict=True)),
        kv_bytes=_kv_bytes(index.shape, settings.engine),
        scratch_bytes=settings.engine.scratch_memory + settings.pool.scratch_bytes,
        available_bytes=_available_bytes(settings.engine.device),
        device=settings.engine.device,
    )
    if plan.need_bytes > plan.available_bytes:
        raise BudgetError(
            f"memory of {plan.device}: need {plan.need_bytes} bytes "
            f"({format_bytes(plan.need_bytes)}: {format_bytes(plan.slots_bytes)} of expert slots, "
            f"{format_bytes(plan.shape.backbone_bytes)} of other weights, "
            f"{format_bytes(plan.kv_bytes)} of KV pages, "
            f"{format_bytes(plan.scratch_bytes)} of scratch), have {plan.available_bytes} bytes "
            f"({format_bytes(plan.available_bytes)}); lower --expert-memory or --kv-memory"
        )
    return plan


def _kv_bytes(shape: ModelShape, engine: EngineSettings) -> int:
    limit = shape.context_limit_tokens
    blocks = shape.kv_blocks(
        engine.kv_memory,
        engine.kv_block_tokens,
        engine.max_sequences,
        min(engine.context_tokens or limit, limit),
    )
    return blocks * shape.kv_block_bytes(engine.kv_block_tokens)


def _available_bytes(device: str) -> int:
    import psutil
    import torch

    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise BudgetError(f'engine.device is "{device}", but torch finds no CUDA device')
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def main() -> None:
    """Reads settings as JSON, prints a Preflight or a refusal."""
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    try:
        answer = msgspec.json.encode(check_model(settings, Path(sys.argv[1])))
    except CoterieError as error:
        print(msgspec.json.encode(_Refused(type(error).__name__, str(error))).decode())
        sys.exit(1)
    print(answer.decode())


if __name__ == "__main__":
    main()
