"""Settings of the engine in one rank. No torch here: gateway and supervisor read them too."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from core.config_model import ByteCount, ConfigModel


class EngineSettings(ConfigModel):
    """How one rank runs the model: numbers, memory and batch limits."""

    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """Number format to compute in; "auto" takes the checkpoint's own."""
    device: str = "cpu"
    """Device of the backbone and the KV pages: "cpu" or "cuda:0"."""
    threads: int = Field(default=0, ge=0)
    """Torch threads of the rank; 0 leaves torch's choice."""
    context_tokens: int | None = Field(default=None, ge=1)
    """Longest sequence served, prompt and answer together; unset takes the model's own limit.
    RoPE factors that depend on length are fixed by this number at start."""
    kv_memory: ByteCount = 1024**3
    """Bytes reserved at start for KV pages, such as "4GiB"; never more than all sequences
    at full context can use."""
    kv_block_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens in one KV block."""
    prefix_cache: bool = True
    """Reuse the KV blocks of equal prompt beginnings, within one tenant."""
    max_sequences: int = Field(default=32, ge=1)
    """Most sequences that run at once in a rank."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Most tokens in one step: decode tokens first, prompt parts fill the rest."""
    scratch_memory: ByteCount = 256 * 1024**2
    """Most bytes that attention may gather and score at once beside weights and pages, reserved at
    start."""
    prefill_memory: ByteCount = 256 * 1024**2
    """Bytes for the hidden states of long prompts that pass layer by layer while not all experts
    have slots, so that each expert is read once a pass; longer ones take several passes. 0 passes
    them in steps of `max_step_tokens`."""
    seed: int = 0
    """Seeds the sequences whose request names no seed."""
    structure_compile_s: float = Field(default=5.0, gt=0)
    """Processor seconds that compiling the structure of a request (JSON schema, grammar) may
    take before the request is refused."""
    structure_token_s: float = Field(default=2.0, gt=0)
    """Seconds that finding the tokens which a structure allows next may take before the request
    fails."""
    structure_cache_memory: ByteCount = 128 * 1024**2
    """Bytes of compiled structures kept for later requests."""

    @model_validator(mode="after")
    def _batch_fits_step(self) -> EngineSettings:
        if self.max_step_tokens < self.max_sequences:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_sequences "
                f"({self.max_sequences}): each running sequence decodes one token a step. "
                "Raise max_step_tokens or lower max_sequences."
            )
        return self
