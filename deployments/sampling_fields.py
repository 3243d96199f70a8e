"""The fields that both generating endpoints share, and the sampling parameters they make."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from core.errors import RequestError
from core.request import SamplingParams, Structure
from deployments.field_kinds import (
    INT64,
    MAX_LIST,
    Count,
    Label,
    Number,
    Strict,
    TokenId,
    Unsupported,
    fault,
)
from deployments.openai_errors import ContextLengthError
from deployments.settings import ServingSettings
from deployments.structured_fields import StructureFields

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}


class StreamOptions(Strict):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    """Usage in a last chunk without choices, before the end mark."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk; needs include_usage."""
    include_obfuscation: Annotated[None, Unsupported("chunks are not padded.", (False,))] = None


def _stop(value: Any) -> tuple[str, ...] | None:
    """One stop string or a list of them; lengths are checked against the limits later."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise fault("expected a text or a list of texts")
    if len(texts) > MAX_LIST:
        raise fault(f"expected at most {MAX_LIST} texts, found {len(texts)}")
    if not all(isinstance(text, str) for text in texts):
        raise fault("expected a text or a list of texts")
    return tuple(texts)


Stop = Annotated[tuple[str, ...] | None, PlainValidator(_stop), WithJsonSchema(_TEXTS)]


class SamplingFields(StructureFields):
    """The fields that both endpoints share. None means: left out."""

    model: str
    max_tokens: Count | None = None
    """Most tokens to generate; left out: what the context leaves room for."""
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    """0 is greedy; left out: what the model's generation_config.json says, as for `top_p`, `top_k`,
    `min_p` and `repetition_penalty`."""
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=INT64)] | None = None
    """Answers to one prompt; the prompt is computed once."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    """Texts that end an answer and are not part of it."""
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LIST)] | None = None
    """By token id, what is added to its logit: -100 to 100."""
    seed: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    user: Label = None
    """Names the session where the header x-session-id does not."""
    service_tier: Literal["auto", "default", "flex"] | None = None
    """"flex" lets interactive requests go first."""
    top_k: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    """-1 and 0 keep all tokens."""
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    min_tokens: Count | None = None
    """The end is impossible before so many tokens."""
    ignore_eos: bool | None = None
    """The answer goes on to max_tokens."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LIST)] | None = None
    """Tokens that end an answer besides the model's own."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the prompt's own tokens, with so many alternatives."""
    best_of: Annotated[int, Field(ge=1, le=INT64)] | None = None
    """Answers to make, of which the `n` likeliest by token are given."""
    skip_special_tokens: Annotated[None, Unsupported("special tokens are no text.", (True,))] = None
    spaces_between_special_tokens: Annotated[
        None, Unsupported("special tokens are no text.", (True,))
    ] = None
    use_beam_search: Annotated[None, Unsupported("there is no beam search.", (False,))] = None
    include_stop_str_in_output: Annotated[
        None, Unsupported("a stop string is never part of it.", (False,))
    ] = None

    @property
    def limit_param(self) -> str:
        """The field that `token_limit` comes from."""
        return "max_tokens"

    def token_limit(self) -> int | None:
        """Most tokens to generate, None where the request leaves it out."""
        return self.max_tokens

    def logprobs_count(self) -> int | None:
        """Alternatives whose log-probabilities are asked for; None: no log-probabilities."""
        raise NotImplementedError

    def prompt_logprobs_count(self) -> int | None:
        """As `logprobs_count`, for the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def fewest_tokens(self) -> int:
        """The least that may be asked for as max_tokens."""
        return 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream tells the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def priority(self) -> Literal["interactive", "batch"]:
        """What `service_tier` means here."""
        return "batch" if self.service_tier == "flex" else "interactive"

    def check_stream(self) -> None:
        """Raises RequestError for fields that make sense only with, or only without, a stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true.", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs needs stream to be false.", "prompt_logprobs")
        if self.stream and self.best_of not in (None, self.n or 1):
            raise RequestError(
                "best_of above n needs stream to be false: which answers are best shows only at "
                "their end.",
                "best_of",
            )

    def stop_strings(self, limits: ServingSettings) -> tuple[str, ...]:
        """Checked against the limits. Raises RequestError."""
        stop = self.stop or ()
        if len(stop) > limits.max_stop_strings:
            raise RequestError(
                f"expected at most {limits.max_stop_strings} stop strings, found {len(stop)}.",
                "stop",
            )
        for text in stop:
            if not 1 <= len(text) <= limits.max_stop_chars:
                raise RequestError(
                    f"expected stop strings of 1 to {limits.max_stop_chars} characters, found one "
                    f"of {len(text)}.",
                    "stop",
                )
        return stop

    def check_scores(self, prompt_tokens: int, limits: ServingSettings) -> None:
        """Raises RequestError where too many log-probabilities of prompts are asked for."""
        count = self.prompt_logprobs_count()
        if count is not None and prompt_tokens * (1 + count) > limits.max_prompt_logprobs:
            raise RequestError(
                f"expected at most {limits.max_prompt_logprobs} log-probabilities of prompts, "
                f"found {prompt_tokens} tokens with {1 + count} each. Ask for fewer alternatives, "
                "or in several requests.",
                "logprobs" if self.prompt_logprobs is None else "prompt_logprobs",
            )

    def choices(self, limits: ServingSettings) -> int:
        """How many answers to a prompt are given. Raises RequestError."""
        n = 1 if self.n is None else self.n
        if n > limits.max_n:
            raise RequestError(f"expected n between 1 and {limits.max_n}, found {n}.", "n")
        return n

    def answers(self, limits: ServingSettings) -> int:
        """How many answers to a prompt are made. Raises RequestError."""
        n = self.choices(limits)
        made = n if self.best_of is None else self.best_of
        if not n <= made <= limits.max_n:
            raise RequestError(
                f"expected best_of between n ({n}) and {limits.max_n}, found {made}.", "best_of"
            )
        return made

    def sampling(
        self,
        prompt_tokens: int,
        context_tokens: int,
        vocab_size: int,
        defaults: dict[str, float],
        default_max_tokens: int | None,
        structure: Structure | None = None,
    ) -> SamplingParams:
        """Sampling parameters for a prompt of known length. Raises RequestError.

        `defaults` come from the model's generation_config.
        """
        asked = self._max_tokens(prompt_tokens, context_tokens, default_max_tokens)

        def value(name: str, neutral: float) -> float:
            given = getattr(self, name)
            return float(defaults.get(name, neutral) if given is None else given)

        logprobs = self.logprobs_count()
        if logprobs is None and self.best_of not in (None, self.n or 1):
            logprobs = 0  # what the best are chosen by
        return SamplingParams(
            max_tokens=asked,
            temperature=value("temperature", 1.0),
            top_p=value("top_p", 1.0),
            top_k=max(0, int(value("top_k", 0))),
            min_p=value("min_p", 0.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=value("repetition_penalty", 1.0),
            seed=self.seed,
            logit_bias=self._bias(vocab_size),
            logprobs=logprobs,
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            structure=structure,
            prompt_logprobs=self.prompt_logprobs_count(),
        )

    def _max_tokens(self, prompt_tokens: int, context_tokens: int, cap: int | None) -> int:
        room = context_tokens - prompt_tokens
        asked = self.token_limit()
        if asked is not None and asked < self.fewest_tokens:
            raise RequestError(
                f"expected {self.limit_param} of at least {self.fewest_tokens}, found {asked}"
                + (" (0 needs echo)." if self.fewest_tokens else "."),
                self.limit_param,
            )
        if room < self.fewest_tokens or (asked is not None and asked > room):
            wanted = "left out" if asked is None else str(asked)
            raise ContextLengthError(
                f"The prompt has {prompt_tokens} tokens and {self.limit_param} is {wanted}; the "
                f"limit for both together is {context_tokens} tokens.",
                self.limit_param if room >= self.fewest_tokens else None,
            )
        if asked is None:
            return room if cap is None else min(room, cap)
        return asked

    def _bias(self, vocab_size: int) -> tuple[tuple[int, float], ...]:
        bias = []
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
                raise RequestError(
                    f"expected token ids from 0 to {vocab_size - 1} as keys of logit_bias, found "
                    f"{key[:40]!r}.",
                    "logit_bias",
                )
            bias.append((int(key), float(value)))
        return tuple(bias)
