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


class PoolSettings(ConfigModel):
    """How much memory experts get, and how they reach it."""

    expert_memory: Annotated[str | int, BeforeValidator(parse_expert_memory)] = "all"
    """Memory for experts on the device: "all", a percentage of all experts' bytes ("50%"),
    or bytes ("8GiB"). The least that works is top_k experts in every MoE layer."""
    policy: Literal["lru", "lfu"] = "lfu"
    """Which expert leaves first: least recently used, or least frequently used with its count
    decayed by .95 a token of its layer."""
    read_threads: int = Field(default=4, ge=1, le=64)
    """Threads that read experts from disk."""
    direct_io: bool = True
    """Read past the page cache (O_DIRECT) where the file system can; else buffered."""
    verify_checksums: bool = True
    """Compare every expert read with its checksum; the first read of an expert learns it."""
    scratch_bytes: ByteCount = Field(default=256 * 1024**2, ge=1024**2)
    """Bytes for the intermediate results of one MoE layer. Inputs that need more pass the layer
    in several row chunks, whose sizes depend on the number of rows alone."""
