"""Settings of the engine in one rank. No torch here: gateway and supervisor read them too."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, model_validator

from core.config_model import ByteCount, ConfigModel

WAITING_LOOKED_AT: Final = 32
"""Of those who wait, the oldest so many are compared where they are grouped by experts."""


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
    batching: Literal["dynamic", "fixed", "frugal"] = "dynamic"
    """How steps are sized (docs/batching.md). "dynamic": as many sequences and prompt tokens as
    the objectives allow by a measured model of step times; "fixed": `max_sequences` and
    `max_step_tokens`, whatever it takes; "frugal": also puts steps off within the objectives, so
    that more sequences share each expert that is read."""
    max_sequences: int = Field(default=32, ge=1)
    """Most sequences that run at once in a rank; on an accelerator 64 unless set."""
    min_sequences: int | None = Field(default=None, ge=1)
    """Sequences that may run at once whatever the objectives say; unset takes 1 on a CPU, 16 on an
    accelerator."""
    grouping: Literal["auto", "off", "on"] = "auto"
    """Whether those who wait are admitted by how far their experts are in use already
    (docs/grouping.md). "auto": while measured to save experts; "on": whatever is measured; "off":
    in order of arrival."""
    max_overtakes: int = Field(default=32, ge=0)
    """How often a waiting sequence may be overtaken by younger ones that share more experts with
    the running ones, or have priority."""
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

    @property
    def fewest_sequences(self) -> int:
        """`min_sequences`, or what stands for it."""
        if self.min_sequences is not None:
            return self.min_sequences
        return 1 if self.device == "cpu" else min(16, self.max_sequences)

    @model_validator(mode="before")
    @classmethod
    def _wider_on_accelerators(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("device", "cpu") != "cpu":
            return {"max_sequences": 64, **values}
        return values

    @model_validator(mode="after")
    def _batch_fits_step(self) -> EngineSettings:
        if self.max_step_tokens < self.max_sequences:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_sequences "
                f"({self.max_sequences}): each running sequence decodes one token a step. "
                "Raise max_step_tokens or lower max_sequences."
            )
        if self.fewest_sequences > self.max_sequences:
            raise ValueError(
                f"min_sequences ({self.min_sequences}) may be at most max_sequences "
                f"({self.max_sequences}). Lower one or raise the other."
            )
        return self
