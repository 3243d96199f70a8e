"""One HTTP request and its answer, as limits and the request log see it."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from deployments.limits_client import Lease
from deployments.openai_errors import exception_of, kind_of
from deployments.text_delta import Batch, Failure, Generation, TextDelta

CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
"""The exchange that the running task belongs to."""


@dataclass(slots=True)
class Exchange:
    """Counts of one exchange. Nothing here depends on what a client sent as its request id."""

    method: str
    path: str
    label: str | None
    """The client's x-request-id, for the log alone."""
    began_s: float = field(default_factory=time.monotonic)
    tenant: str = ""
    model: str = ""
    """The one that answers, whatever name was asked for."""
    group: str = ""
    """That of its replicas; "" where the model has none."""
    lease: Lease | None = None
    status: int = 0
    error: str | None = None
    domain_hint: str = ""
    domains: list[str] = field(default_factory=list)
    """Of the prompts, each once; "" is not known."""
    session: str = ""
    """The hash that the engine sees."""
    request_ids: list[str] = field(default_factory=list)
    priority: str = "interactive"
    streamed: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    open_streams: int = 0
    body: str | None = None

    def start(self, generation: Generation) -> None:
        """A prompt of this exchange goes to the model."""
        request = generation.request
        self.request_ids.append(request.request_id)
        self.priority = request.priority
        if request.domain not in self.domains:
            self.domains.append(request.domain)
        self.session = request.session
        self.streamed = generation.stream
        self.prompt_tokens += len(request.prompt_ids)
        self.open_streams += 1

    def take(self, batch: Batch, seen: dict[int, int]) -> None:
        """Counts a batch of one prompt; `seen` holds that prompt's tokens by choice."""
        before = self.completion_tokens
        for delta in batch:
            if isinstance(delta, Failure):
                self.failed(exception_of(delta))
            elif isinstance(delta, TextDelta):
                more = delta.completion_tokens - seen.get(delta.index, 0)
                if more > 0:
                    seen[delta.index] = delta.completion_tokens
                    self.completion_tokens += more
                if delta.finish_reason is not None:
                    self.finish_reasons.append(delta.finish_reason)
                self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        produced = self.completion_tokens - before
        if produced and self.first_token_s is None:
            self.first_token_s = time.monotonic()
        if produced and self.lease is not None:
            self.lease.produced(produced)

    def failed(self, error: BaseException) -> None:
        """Remember what ended it, unless something was remembered before."""
        self.error = self.error or kind_of(type(error)).code or type(error).__name__

    def record(self) -> dict[str, Any]:
        """The line of the request log."""
        now = time.monotonic()
        ttft_s = None
        if self.streamed and self.first_token_s is not None:
            ttft_s = self.first_token_s - self.began_s
        line: dict[str, Any] = {
            "time_s": round(time.time(), 3),
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_ms": _ms(now - self.began_s),
        }
        optional = {
            "label": self.label,
            "tenant": self.tenant or None,
            "model": self.model or None,
            "group": self.group or None,
            "domain_hint": self.domain_hint or None,
            "session": self.session or None,
            "request_ids": self.request_ids or None,
            "error": self.error,
            "body": self.body,
        }
        line |= {name: value for name, value in optional.items() if value is not None}
        if self.request_ids:
            line |= {
                "priority": self.priority,
                "domains": self.domains,
                "stream": self.streamed,
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.completion_tokens,
                "ttft_ms": None if ttft_s is None else _ms(ttft_s),
                "finish_reasons": self.finish_reasons,
            }
        return line


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
