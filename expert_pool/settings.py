"""Settings of the expert pool. No torch here: the gateway reads settings too."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from core.config_model import ByteCount, ConfigModel, parse_bytes

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_expert_memory(value: object) -> str | int:
    """`"all"`, a percentage such as `"50%"`, or bytes. Raises ValueError for anything else."""
    if isinstance(value, str):
        if value.strip().lower() == "all":
            return "all"
        percent = _PERCENT.fullmatch(value)
        if percent is not None:
            if float(percent.group(1)) > 100:
                raise ValueError(f"expected at most 100% of the experts' bytes, found {value!r}")
            return f"{percent.group(1)}%"
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(
            f'expected "all", a percentage such as "50%", or bytes such as "8GiB", found {value!r}'
        ) from error


def expert_memory_bytes(expert_memory: str | int, all_experts_bytes: int) -> int:
    """Bytes that an `expert_memory` setting grants to a model with `all_experts_bytes` of slots."""
    granted = parse_expert_memory(expert_memory)
    if granted == "all":
        return all_experts_bytes
    if isinstance(granted, str):
        return int(all_experts_bytes * float(granted.removesuffix("%")) / 100)
    return granted


def parse_host_memory(value: object) -> str | int:
    """`"auto"`, `"off"`, `"all"`, a percentage, or bytes. Raises ValueError for anything else."""
    if value is False or (isinstance(value, str) and value.strip().lower() == "off"):
        return "off"  # YAML reads a bare off as false
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return parse_expert_memory(value)
    except ValueError as error:
        raise ValueError(
            'expected "auto", "off", "all", a percentage such as "50%", or bytes such as "8GiB", '
            f"found {value!r}"
        ) from error


def host_memory_bytes(
    host_memory: str | int, all_experts_bytes: int, spare_bytes: int, on_device: bool
) -> int:
    """Bytes of the host tier; `spare_bytes` is what the machine has beside everything else.

    Never more than all experts take.
    """
    chosen = parse_host_memory(host_memory)
    if chosen == "auto":
        half = max(0, spare_bytes) // 2
        # A part of them would cost slower reads of all others on a CPU machine.
        chosen = half if on_device or half >= all_experts_bytes else 0
    elif chosen == "off":
        chosen = 0
    elif chosen == "all":
        chosen = all_experts_bytes
    elif isinstance(chosen, str):
        chosen = int(max(0, spare_bytes) * float(chosen.removesuffix("%")) / 100)
    return min(int(chosen), all_experts_bytes)


class PoolSettings(ConfigModel):
    """How much memory experts get, and how they reach it."""

    expert_memory: Annotated[str | int, BeforeValidator(parse_expert_memory)] = "all"
    """Memory for experts on the device: "all", a percentage of all experts' bytes ("50%"),
    or bytes ("8GiB"). The least that works is top_k experts in every MoE layer."""
    host_memory: Annotated[str | int, BeforeValidator(parse_host_memory)] = "auto"
    """Memory of the machine for experts that are not in slots: "off", "all" experts, a percentage
    of what is free ("50%"), or bytes. On a CPU machine it is page cache that reads leave behind,
    and "auto" is all of them where twice that is free, else off: slots are the better use of
    memory that is short. Beside a device it is shared by all replicas and outlives them, and
    "auto" is half of what is free."""
    policy: Literal["lru", "lfu", "affinity"] = "affinity"
    """Which expert leaves first: the least recently used; the least frequently used, its count
    decayed by .95 a token of its layer; or the one least likely to be asked for again soon, given
    whom the layer asks for now, which is learned while serving."""
    hysteresis: float = Field(default=8.0, ge=0)
    """An expert leaves last while its share of the router's weight, smoothed over its layer's
    tokens by .95, is at least so many times an even share (1 / experts); 0: no such rule."""
    move_quotas: bool = True
    """Let slots go from layers that would hardly miss them to layers that would use them."""
    hot_set: dict[int, list[int]] = Field(default_factory=dict)
    """Experts that never leave once they are there, by MoE layer (0 is the first): {0: [3, 17]}.
    A layer keeps at least top_k slots for others."""
    regret_layers: int = Field(default=4, ge=0, le=64)
    """Layers, evenly spaced, whose misses are compared with the best possible afterwards."""
    prefetch: Literal["auto", "on", "off"] = "auto"
    """Whether to read the experts that later layers will likely need before they ask: "auto" while
    it measurably pays, "on" always, "off" never."""
    hot_start_s: float = Field(default=10.0, ge=0)
    """Seconds that a start may take to read the experts that were used most in earlier runs, before
    it is ready. 0: they are neither read nor kept count of."""
    hints: Literal["auto", "on", "off"] = "auto"
    """Whether to read what a request will likely need, by its domain and session, while it is still
    queued: "auto" while it measurably pays, "on" always, "off" never."""
    popularity_memory: ByteCount = Field(default=16 * 1024**2, ge=0)
    """Bytes for what is known of domains and sessions, at most 64 of each; 0: they are not looked
    at."""
    tenant_share: float = Field(default=0.5, gt=0, le=1)
    """What one tenant counts for at most in the popularity of a domain that others use too, and the
    share of the experts read by hints that may be read for it."""
    read_threads: int = Field(default=4, ge=1, le=64)
    """Threads that read experts from disk."""
    direct_io: bool = True
    """Read past the page cache (O_DIRECT) where the file system can; else buffered."""
    verify_checksums: bool = True
    """Compare every expert read with its checksum; the first read of an expert learns it."""
    kernel: Literal["auto", "torch", "native", "avx2", "generic"] = "auto"
    """What computes bf16 experts on a CPU: "native" kernels, which `make install` compiles where
    there is a C++ compiler; "torch"; or "auto", native for as many rows an expert as a short
    measurement at the first start found it faster. "avx2" and "generic" are native with those
    instructions alone. Last bits differ between them. Layers that native cannot compute go to
    torch."""
    scratch_bytes: ByteCount = Field(default=256 * 1024**2, ge=1024**2)
    """Bytes for the intermediate results of one MoE layer. Inputs that need more pass the layer
    in several row chunks, whose sizes depend on the number of rows alone."""
