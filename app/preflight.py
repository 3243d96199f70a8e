"""Checks models and their memory before anything starts: `python -m app.preflight` is the child.

The child imports torch and dies with it, so the command line stays small beside Ray.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from app.model_entries import ModelEntry
from app.settings import Settings
from core import errors
from core.config_model import format_bytes
from core.errors import BudgetError, CoterieError
from core.model_shape import ModelShape
from engine.settings import EngineSettings

if TYPE_CHECKING:
    from expert_pool.checkpoint_index import CheckpointIndex


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that can be served, in numbers. All sizes in bytes."""

    name: str
    """What clients call the model."""
    group: str
    shape: ModelShape
    slots_by_layer: tuple[int, ...]
    slots_bytes: int
    kv_bytes: int
    scratch_bytes: int
    """Attention, one MoE layer, and prompts that pass layer by layer."""
    available_bytes: int
    """On the device; on the CPU, for all models together."""
    device: str
    replicas: int
    host_bytes: int
    """Of the host tier: once for all replicas, and for all groups of a model."""
    host_available_bytes: int

    @property
    def need_bytes(self) -> int:
        """What one rank reserves and loads."""
        return self.shape.backbone_bytes + self.slots_bytes + self.kv_bytes + self.scratch_bytes

    @property
    def all_need_bytes(self) -> int:
        """What its replicas need of one device: each rank has a GPU to itself, all one CPU."""
        return self.need_bytes * (self.replicas if self.is_on_cpu else 1)

    @property
    def is_on_cpu(self) -> bool:
        """Replicas and the host tier share one memory."""
        return self.device == "cpu"

    @property
    def title(self) -> str:
        """The model's name, and its group's where it has one."""
        return f"{self.name} ({self.group})" if self.group else self.name


class _Refused(msgspec.Struct):
    error: str
    message: str


class PreflightProcess:
    """The check under way in a child, while the parent does something else."""

    def __init__(self, settings: Settings, folders: Sequence[Path]) -> None:
        """A folder for each of the settings' entries."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "app.preflight", *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._input = settings.model_dump_json().encode()

    def result(self) -> list[Preflight]:
        """Waits for it. Raises CheckpointError, BudgetError or whatever the check raised."""
        out, err = self._child.communicate(self._input)
        if self._child.returncode == 0:
            return msgspec.json.decode(out, type=list[Preflight])
        try:
            refused = msgspec.json.decode(out, type=_Refused)
        except msgspec.DecodeError:
            said = err.decode(errors="replace").strip()
            raise CoterieError(f"the check of the model failed: {said}") from None
        kind = getattr(errors, refused.error, CoterieError)
        raise kind(refused.message)


def check_models(settings: Settings, folders: Sequence[Path]) -> list[Preflight]:
    """Indexes the checkpoints and compares what all ranks need with what the devices have.

    Raises CheckpointError and BudgetError. Imports torch.
    """
    import torch

    from expert_pool.checkpoint_index import CheckpointIndex
    from expert_pool.tiers import host_tier_bytes

    indexes: list[CheckpointIndex] = []
    plans: list[Preflight] = []
    for entry, folder in zip(settings.entries(), folders, strict=True):
        dtype = entry.engine.dtype
        index = CheckpointIndex.open(folder, None if dtype == "auto" else dtype)
        _check_small_files(settings, entry, folder, index.shape.vocab_size)
        indexes.append(index)
        plans.append(_plan(entry, index))
    _refuse_too_few_gpus(plans)
    _refuse_too_much(plans)
    spare = _available_bytes("cpu") - sum(plan.all_need_bytes for plan in plans if plan.is_on_cpu)
    tiers: dict[Path, int] = {}
    for number, (entry, folder) in enumerate(zip(settings.entries(), folders, strict=True)):
        # Groups of one model share its tier, and replicas do.
        others = sum(tiers.values()) - tiers.get(folder, 0)
        device = torch.device(entry.engine.device)
        host = host_tier_bytes(indexes[number], entry.pool, device, spare - others)
        tiers[folder] = max(host, tiers.get(folder, 0))
        plans[number] = msgspec.structs.replace(plans[number], host_bytes=host)
    _refuse_too_large_tiers(plans, sum(tiers.values()), spare)
    return plans


def _check_small_files(
    settings: Settings, entry: ModelEntry, folder: Path, vocab_size: int
) -> None:
    """What a replica and a gateway would stumble over much later. Raises CheckpointError."""
    from deployments.output_formats import OutputFormats
    from deployments.text_threads import TextThreads
    from deployments.tokenizer_worker import TokenizerWorker
    from engine.eos_ids import read_eos_ids
    from engine.sampling_defaults import sampling_defaults

    read_eos_ids(folder, vocab_size)
    sampling_defaults(folder)
    threads = TextThreads()
    TokenizerWorker.open(folder, threads)
    threads.close()
    OutputFormats.open(folder, settings.serving_of(entry))


def _plan(entry: ModelEntry, index: CheckpointIndex) -> Preflight:
    from expert_pool.settings import expert_memory_bytes
    from expert_pool.slots import share_out

    engine, pool = entry.engine, entry.pool
    granted = expert_memory_bytes(pool.expert_memory, index.shape.all_experts_bytes)
    slots = share_out(index.layers, granted)
    scratch = engine.scratch_memory + pool.scratch_bytes
    if sum(slots) < sum(layer.num_experts for layer in index.layers):
        scratch += engine.prefill_memory
    return Preflight(
        name=entry.name,
        group=entry.group,
        shape=index.shape,
        slots_by_layer=tuple(slots),
        slots_bytes=sum(n * layer.slot_bytes for n, layer in zip(slots, index.layers, strict=True)),
        kv_bytes=_kv_bytes(index.shape, engine),
        scratch_bytes=scratch,
        available_bytes=_available_bytes(engine.device),
        device=engine.device,
        replicas=entry.replicas,
        host_bytes=0,
        host_available_bytes=_available_bytes("cpu"),
    )


def by_device(plans: Sequence[Preflight]) -> Iterator[tuple[str, list[Preflight]]]:
    """The plans whose replicas share a device: the CPU's all one, a GPU's none."""
    if on_cpu := [plan for plan in plans if plan.is_on_cpu]:
        yield on_cpu[0].device, on_cpu
    yield from ((plan.device, [plan]) for plan in plans if not plan.is_on_cpu)


def gpu_ranks(plans: Sequence[Preflight]) -> int:
    """GPUs that the replicas take, each one of its own."""
    return sum(plan.replicas for plan in plans if not plan.is_on_cpu)


def _refuse_too_few_gpus(plans: Sequence[Preflight]) -> None:
    """Raises BudgetError where ranks would wait for a GPU until they are given up."""
    import torch

    need = gpu_ranks(plans)
    if need and need > (have := torch.cuda.device_count()):
        parts = [f"{plan.title} {plan.replicas}" for plan in plans if not plan.is_on_cpu]
        raise BudgetError(
            f"GPUs: need {need}, one for each replica ({', '.join(parts)}), have {have}; lower "
            "--replicas, serve fewer models, or put some on the CPU"
        )


def _refuse_too_much(plans: Sequence[Preflight]) -> None:
    """Raises BudgetError naming need and have of a device."""
    for device, here in by_device(plans):
        need, have = sum(plan.all_need_bytes for plan in here), here[0].available_bytes
        if need <= have:
            continue
        parts = [_parts(plan) for plan in here]
        if len(here) > 1:
            parts = [
                f"{plan.title} {format_bytes(plan.all_need_bytes)}: {part}"
                for plan, part in zip(here, parts, strict=True)
            ]
        replicas = ", or --replicas" * any(p.is_on_cpu and p.replicas > 1 for p in here)
        models = ", or serve fewer models" * (len(here) > 1)
        raise BudgetError(
            f"memory of {device}: need {need} bytes ({format_bytes(need)}: {'; '.join(parts)}), "
            f"have {have} bytes ({format_bytes(have)}); lower --expert-memory or --kv-memory"
            f"{replicas}{models}"
        )


def _parts(plan: Preflight) -> str:
    several = ""
    if plan.is_on_cpu and plan.replicas > 1:
        several = f"{plan.replicas} replicas of {format_bytes(plan.need_bytes)}: "
    return (
        f"{several}{format_bytes(plan.slots_bytes)} of expert slots, "
        f"{format_bytes(plan.shape.backbone_bytes)} of other weights, "
        f"{format_bytes(plan.kv_bytes)} of KV pages, "
        f"{format_bytes(plan.scratch_bytes)} of scratch"
    )


def _refuse_too_large_tiers(plans: Sequence[Preflight], need: int, left: int) -> None:
    """Raises BudgetError where the host tiers `need` more than what is `left` of the machine."""
    if need > left:
        beside_bytes = sum(plan.all_need_bytes for plan in plans if plan.is_on_cpu)
        beside = f" beside {format_bytes(beside_bytes)} of replicas" * bool(beside_bytes)
        raise BudgetError(
            f"host memory: need {need} bytes ({format_bytes(need)}){beside}, have {left} bytes "
            f"({format_bytes(left)}); lower --host-memory, or leave it at auto"
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
    """Reads settings as JSON, prints a list of Preflight or a refusal."""
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    try:
        answer = msgspec.json.encode(check_models(settings, [Path(name) for name in sys.argv[1:]]))
    except CoterieError as error:
        print(msgspec.json.encode(_Refused(type(error).__name__, str(error))).decode())
        sys.exit(1)
    print(answer.decode())


if __name__ == "__main__":
    main()
