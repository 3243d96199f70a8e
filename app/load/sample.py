"""What became of one request of a load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Sample:
    """Times are seconds of one monotonic clock; `due_s` is when the request should be sent.

    `error` is None, an HTTP status such as "503", or a kind: "stream" (an error frame), "cut off",
    "no usage", "connection", "timeout". Tokens are the server's count.
    """

    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    message: str = ""
    retry_after_s: float | None = None

    @property
    def ok(self) -> bool:
        """Whether it was answered to its end."""
        return self.error is None

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first text: waiting for a free connection counts too."""
        return (self.ended_s if self.first_s is None else self.first_s) - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    def meets(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Whether it was answered within both objectives."""
        tpot_s = self.tpot_s or 0.0
        return self.ok and self.ttft_s * 1e3 <= ttft_ms and tpot_s * 1e3 <= tpot_ms
