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
    """Attention, one MoE layer, and prompts that pass layer by layer."""
    available_bytes: int
    device: str
    replicas: int
    host_bytes: int
    """Of the host tier: once for all replicas."""
    host_available_bytes: int

    @property
    def need_bytes(self) -> int:
        """What one rank reserves and loads."""
        return self.shape.backbone_bytes + self.slots_bytes + self.kv_bytes + self.scratch_bytes

    @property
    def is_on_cpu(self) -> bool:
        """Replicas and the host tier share one memory."""
        return self.device == "cpu"


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
    import torch

    from deployments.output_formats import OutputFormats
    from deployments.tokenizer_worker import TokenizerWorker
    from engine.eos_ids import read_eos_ids
    from engine.sampling_defaults import sampling_defaults
    from expert_pool.checkpoint_index import CheckpointIndex
    from expert_pool.settings import expert_memory_bytes
    from expert_pool.slots import share_out
    from expert_pool.tiers import host_tier_bytes

    engine, pool = settings.engine, settings.pool
    index = CheckpointIndex.open(folder, None if engine.dtype == "auto" else engine.dtype)
    # The small files, which a replica and a gateway would stumble over much later.
    read_eos_ids(folder, index.shape.vocab_size)
    sampling_defaults(folder)
    TokenizerWorker.open(folder).close()
    OutputFormats.open(folder, settings.serving)
    granted = expert_memory_bytes(pool.expert_memory, index.shape.all_experts_bytes)
    slots = share_out(index.layers, granted)
    scratch = engine.scratch_memory + pool.scratch_bytes
    if sum(slots) < sum(layer.num_experts for layer in index.layers):
        scratch += engine.prefill_memory
    host_available = _available_bytes("cpu")
    plan = Preflight(
        shape=index.shape,
        slots_by_layer=tuple(slots),
        slots_bytes=sum(n * layer.slot_bytes for n, layer in zip(slots, index.layers, strict=True)),
        kv_bytes=_kv_bytes(index.shape, engine),
        scratch_bytes=scratch,
        available_bytes=_available_bytes(engine.device),
        device=engine.device,
        replicas=settings.serving.replicas if engine.device == "cpu" else 1,
        host_bytes=0,
        host_available_bytes=host_available,
    )
    spare = host_available - (plan.need_bytes * plan.replicas if plan.is_on_cpu else 0)
    host = host_tier_bytes(index, pool, torch.device(engine.device), spare)
    plan = msgspec.structs.replace(plan, host_bytes=host)
    _refuse_too_much(plan)
    return plan


def _refuse_too_much(plan: Preflight) -> None:
    """Raises BudgetError naming need and have."""
    each = plan.need_bytes
    need, have = each * plan.replicas, plan.available_bytes
    if need > have:
        several = f"{plan.replicas} replicas of {format_bytes(each)}: " * (plan.replicas > 1)
        raise BudgetError(
            f"memory of {plan.device}: need {need} bytes "
            f"({format_bytes(need)}: {several}{format_bytes(plan.slots_bytes)} of expert slots, "
            f"{format_bytes(plan.shape.backbone_bytes)} of other weights, "
            f"{format_bytes(plan.kv_bytes)} of KV pages, "
            f"{format_bytes(plan.scratch_bytes)} of scratch), have {have} bytes "
            f"({format_bytes(have)}); lower --expert-memory or --kv-memory"
            + ", or --replicas"
            * (plan.replicas > 1)
        )
    left = plan.host_available_bytes - (need if plan.is_on_cpu else 0)
    if plan.host_bytes > left:
        beside = f" beside {format_bytes(need)} of replicas" * plan.is_on_cpu
        raise BudgetError(
            f"host memory: need {plan.host_bytes} bytes ({format_bytes(plan.host_bytes)}){beside}, "
            f"have {left} bytes ({format_bytes(left)}); lower --host-memory, or leave it at auto"
        )


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
    import torch

    from expert_pool.host_memory import available_bytes

    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise BudgetError(f'engine.device is "{device}", but torch finds no CUDA device')
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


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
