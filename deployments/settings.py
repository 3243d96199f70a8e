"""Settings of the HTTP service and the objectives it is held to. No torch, no Ray."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from core.config_model import ByteCount, ConfigModel
from core.errors import SettingsError
from engine.settings import WAITING_LOOKED_AT

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
ToolParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "glm4", "mistral", "mistral_v11", "deepseek_v3",
    "deepseek_v31", "harmony", "llama3_json", "llama_pythonic",
]  # fmt: skip
ReasoningParser = Literal["auto", "none", "think", "mistral_think"]


class ServingSettings(ConfigModel):
    """The HTTP service: address, replicas, limits, and how long to wait for what."""

    host: str = "127.0.0.1"
    """Address the HTTP proxy listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port the HTTP proxy listens on."""
    model_name: str | None = None
    """Name of the model in requests and in /v1/models; left out: the folder's name or hub id."""
    group: str = Field(default="", pattern=r"^[\w.-]{0,64}$")
    """Name of these replicas where `models` gives the model further groups."""
    gateways: Positive = 1
    """Gateway processes; tenants' limits hold for all of them together."""
    replicas: Positive = 1
    """Replicas of the model (at most, where min_replicas is below it)."""
    min_replicas: Annotated[int, Field(ge=0)] | None = None
    """Fewest replicas; below `replicas`, Serve scales between both; 0 lets an idle model unload."""
    rank_cpus: Annotated[float, Field(ge=0)] = 0.5
    """Logical CPUs that Ray reserves for a rank (a count for placement, not a limit)."""
    max_body_bytes: ByteCount = 8 * 1024**2
    """Largest request body, in bytes; larger ones get 413."""
    max_ongoing_requests: Positive = 512
    """Requests a replica holds at once, running and waiting together."""
    max_queued_requests: Positive = 256
    """Requests a replica keeps waiting before it answers 503."""
    max_queued_prompt_tokens: Positive = 2_000_000
    """Prompt tokens a replica keeps waiting before it answers 503."""
    default_max_tokens: Positive | None = None
    """Cap on generated tokens where a request names none; left out: what the context leaves."""
    max_n: Positive = 16
    """Most choices (`n`) one request may ask for."""
    max_prompts: Positive = 128
    """Most answers (prompts times `n`) that a completion request with several prompts may get."""
    max_prompt_logprobs: Positive = 100_000
    """Most log-probabilities of prompts in one request: tokens times (1 + the alternatives)."""
    max_stop_strings: Positive = 16
    """Most stop strings one request may name."""
    max_stop_chars: Positive = 512
    """Longest stop string, in characters."""
    tool_parser: ToolParser = "auto"
    """How the model writes calls of tools; "auto" looks into its template and vocabulary."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model marks reasoning; "auto" looks into its template."""
    keys_file: str | None = None
    """YAML file of API keys and tenants; with it or COTERIE_API_KEYS, requests need a key."""
    tenant_requests_per_minute: Positive | None = None
    """Requests a tenant may send in any minute, unless the keys file says otherwise."""
    tenant_tokens_per_minute: Positive | None = None
    """Prompt and generated tokens a tenant may use in any minute, unless the keys file says."""
    tenant_concurrency: Positive | None = None
    """Requests a tenant may have at once, unless the keys file says otherwise."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API, such as "https://a.example"; none: CORS off."""
    request_log: str | None = None
    """Folder for a JSON line a request; left out: the lines go into the gateways' own log."""
    log_bodies: bool = False
    """Whether the request log holds the first 16 KiB of each request's body, prompts included."""
    drain_s: Seconds = 30.0
    """How long running streams may go on after a stop was asked for, in seconds."""
    rank_wait_s: Seconds = 60.0
    """How long a request waits for a rank that is being made again before it gets 503."""
    rank_start_s: Seconds = 1800.0
    """How long a rank may take to load its model before it is given up, in seconds."""
    heartbeat_timeout_s: Seconds = 15.0
    """Silence of a rank after which it counts as dead, in seconds."""
    step_timeout_s: Seconds = 300.0
    """Length of one step after which the rank counts as hung, in seconds."""

    @model_validator(mode="after")
    def _replica_bounds(self) -> ServingSettings:
        refuse_replica_bounds(self.replicas, self.min_replicas)
        return self


def refuse_replica_bounds(replicas: int, min_replicas: int | None) -> None:
    """Raises ValueError for bounds that contradict."""
    if min_replicas is not None and min_replicas > replicas:
        raise ValueError(
            f"min_replicas ({min_replicas}) is above replicas ({replicas}); "
            "lower the one or raise the other"
        )


def check_sizes(serving: ServingSettings, max_sequences: int, context_tokens: int | None) -> None:
    """Refuse queue sizes that contradict the engine's. Raises SettingsError."""
    if context_tokens is not None and serving.max_queued_prompt_tokens < context_tokens:
        raise SettingsError(
            f"serving.max_queued_prompt_tokens ({serving.max_queued_prompt_tokens}) is below "
            f"engine.context_tokens ({context_tokens}): the longest prompt could never wait. "
            "Raise the first or lower the second."
        )
    if max_sequences > serving.max_ongoing_requests:
        raise SettingsError(
            f"engine.max_sequences ({max_sequences}) is above serving.max_ongoing_requests "
            f"({serving.max_ongoing_requests}): the batch could never fill. Raise the second or "
            "lower the first."
        )
    if serving.max_n > max(max_sequences, 1) * 64:
        raise SettingsError(
            f"serving.max_n ({serving.max_n}) is more than 64 times engine.max_sequences "
            f"({max_sequences}): one request would hold the batch for 64 rounds. Lower max_n."
        )


def hand_over_limit(max_sequences: int, grouping: bool = False) -> int:
    """Sequences a supervisor lets its rank hold at once: the batch and a few to choose from, or
    more where it chooses by what they have in common."""
    few = max(2, max_sequences // 2)
    return max_sequences + (max(few, WAITING_LOOKED_AT) if grouping else few)


REFUSAL_ROOM = 64
"""Calls beyond max_ongoing_requests that Serve may hand to a replica. The replica's own queue
decides about admission, so Serve's limit lies above it: room to refuse, and to answer status."""
