"""An engine that answers at once: what remains of a request's time is the serving stack's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from core.request import Request
from core.step import SequenceOutput, StepResult, StepStats

_TOKEN = 300
_VOCABULARY = 4096


class InstantEngine:
    """One token a sequence and step, without any computation, to max_tokens."""

    def __init__(self, max_sequences: int) -> None:
        self.shape = SimpleNamespace(vocab_size=_VOCABULARY, model_type="instant")
        self.limits = SimpleNamespace(context_tokens=1 << 20, max_sequences=max_sequences)
        self.eos_ids = (0,)
        self._live: dict[str, list[Any]] = {}
        self._steps = 0

    def add(self, request: Request) -> None:
        """Queue a request; all run at once."""
        self._live[request.request_id] = [request, 0]

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Forget a request."""
        self._live.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether any request runs."""
        return bool(self._live)

    def step(self) -> StepResult:
        """One token each."""
        self._steps += 1
        outputs = []
        for entry in list(self._live.values()):
            request: Request = entry[0]
            entry[1] += 1
            ended = entry[1] >= request.params.max_tokens
            if ended:
                del self._live[request.request_id]
            outputs.append(
                SequenceOutput(
                    request_id=request.request_id,
                    index=0,
                    token_ids=(_TOKEN,),
                    finish_reason="length" if ended else None,
                    completion_tokens=entry[1],
                )
            )
        return StepResult(outputs=tuple(outputs), stats=self.gauges())

    def gauges(self) -> StepStats:
        """How many requests run."""
        return StepStats(step=self._steps, step_s=0.0, running=len(self._live))

    def check_invariants(self) -> None:
        """Nothing is kept that could be wrong."""

    def close(self) -> None:
        """Nothing to give back."""


def open_engine(settings: dict[str, Any]) -> InstantEngine:
    """The engine factory for a rank."""
    return InstantEngine(int(settings["engine"].get("max_sequences", 64)))
