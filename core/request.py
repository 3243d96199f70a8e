"""A request as the engine sees it: token ids and sampling parameters, nothing of JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.errors import RequestError

Priority = Literal["interactive", "batch"]
StructureKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]


class Structure(msgspec.Struct, frozen=True):
    """A form that the generated text must have."""

    kind: StructureKind
    text: str = ""
    """The schema, expression, grammar or structural tag; for "choice" a JSON list of texts; for
    "json_object" nothing."""
    param: str | None = None
    """The request field that asks for it, which an error names."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Validated where it is made: an instance is always coherent.

    Order of application: logit_bias, penalties, min_tokens mask, temperature, top_k, top_p, min_p.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: no log-probabilities; n: of the chosen token and of the n likeliest."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence besides the model's own EOS ids."""
    structure: Structure | None = None
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt; the first has none. With it, max_tokens may be
    0: the prompt is looked at and nothing is generated."""

    def __post_init__(self) -> None:
        def refuse(param: str, expected: str, found: object) -> None:
            raise RequestError(f"{param} must be {expected}, found {found!r}.", param)

        if self.max_tokens < (1 if self.prompt_logprobs is None else 0):
            refuse("max_tokens", "at least 1 (0 with prompt_logprobs)", self.max_tokens)
        if not 0.0 <= self.temperature <= 2.0:
            refuse("temperature", "between 0 and 2", self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "above 0 and at most 1", self.top_p)
        if self.top_k < 0:
            refuse("top_k", "0 (off) or positive", self.top_k)
        if not 0.0 <= self.min_p <= 1.0:
            refuse("min_p", "between 0 and 1", self.min_p)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                refuse(name, "between -2 and 2", getattr(self, name))
        # Logits are divided by it: by something close to 0 they are no longer finite.
        if not 0.01 <= self.repetition_penalty <= 10.0:
            refuse("repetition_penalty", "between 0.01 and 10", self.repetition_penalty)
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            refuse("logprobs", "between 0 and 20", self.logprobs)
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= 20:
            refuse("prompt_logprobs", "between 0 and 20", self.prompt_logprobs)
        if not 0 <= self.min_tokens <= self.max_tokens:
            refuse("min_tokens", f"between 0 and max_tokens ({self.max_tokens})", self.min_tokens)
        for token, bias in self.logit_bias:
            if token < 0 or not -100.0 <= bias <= 100.0:
                refuse("logit_bias", "token ids >= 0 with a bias in -100..100", {token: bias})


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable request. `n` sequences share its prompt; each is named (request_id, index)."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    tenant: str = ""
    """Salts the prefix cache, so that no tenant can probe another's prompts."""
    arrival_s: float = 0.0
    """Wall-clock seconds since the epoch when the gateway accepted the request."""
    priority: Priority = "interactive"
    deadline_s: float | None = None
    """Wall-clock seconds since the epoch after which nobody wants the answer."""
    domain: str = ""
    """What the text is about, as the caller says or a classifier guesses; "" where unknown."""
    session: str = ""
    """Names the conversation among those of its tenant; "" where there is none."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise RequestError("The prompt must hold at least one token, found none.", "prompt")
        if self.n < 1:
            raise RequestError(f"n must be at least 1, found {self.n}.", "n")
