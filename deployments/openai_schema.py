"""What a request body may hold: strict models of the two endpoints, and what they mean.

Fields of OpenAI's API come first, then the extensions that vLLM made common. A field that is not
listed is refused by name, so that nothing a client asks for is dropped in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from core.errors import RequestError
from core.request import SamplingParams
from deployments.openai_errors import ContextLengthError
from deployments.settings import ServingSettings

_INT64 = 2**63 - 1
_MAX_LIST = 1024
MAX_MESSAGES = 4096

Count = Annotated[int, Field(ge=0, le=_INT64)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool = False


class TextFormat(_Strict):
    """The only response format served now."""

    type: Literal["text"]


def _content(value: Any) -> str:
    """A message's content as one text: a text, or text parts joined by line ends."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) and 0 < len(value) <= _MAX_LIST else [None]
    texts = [str(part["text"]) for part in parts if isinstance(part, dict) and _is_text_part(part)]
    if len(texts) != len(parts):
        raise _fault('expected a text, or a list of parts {"type": "text", "text": ...}')
    return "\n".join(texts)


def _is_text_part(part: dict[str, Any]) -> bool:
    return (
        part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)
    )


def _stop(value: Any) -> tuple[str, ...] | None:
    """One stop string or a list of them; lengths are checked against the limits later."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise _fault("expected a text or a list of texts")
    if len(texts) > _MAX_LIST:
        raise _fault(f"expected at most {_MAX_LIST} texts, found {len(texts)}")
    if not all(isinstance(text, str) for text in texts):
        raise _fault("expected a text or a list of texts")
    return tuple(texts)


def _prompt(value: Any) -> str | tuple[int, ...]:
    """One text, or one list of token ids; neither may be empty."""
    if isinstance(value, str):
        if not value:
            raise _fault("expected at least one character, found an empty text")
        return value
    if isinstance(value, list):
        if not value:
            raise _fault("expected at least one token id, found an empty list")
        if all(type(token) is int and 0 <= token < 2**31 for token in value):
            return tuple(value)
        if isinstance(value[0], str | list):
            raise _fault("a list of prompts is not supported: send one request for each")
    raise _fault("expected one text or one list of token ids")


def _fault(message: str) -> PydanticCustomError:
    return PydanticCustomError("coterie", "{message}", {"message": message})


class Message(_Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(_content)]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The turn as chat templates read it."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **named}


class SamplingFields(_Strict):
    """The fields that both endpoints share. None means: left out."""

    model: str
    max_tokens: Count | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[str, ...] | None, PlainValidator(_stop)] = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=_MAX_LIST)] | None = None
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    user: str | None = None
    """A label of the caller's own; taken and not used."""
    top_k: Annotated[int, Field(ge=-1, le=_INT64)] | None = None
    """-1 and 0 keep all tokens."""
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_LIST)] | None = None

    limit_param: ClassVar[str] = "max_tokens"

    def token_limit(self) -> int | None:
        """Most tokens to generate, None where the request leaves it out."""
        return self.max_tokens

    def logprobs_count(self) -> int | None:
        """Alternatives whose log-probabilities are asked for; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

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

    def choices(self, limits: ServingSettings) -> int:
        """How many answers are asked for. Raises RequestError."""
        n = 1 if self.n is None else self.n
        if n > limits.max_n:
            raise RequestError(f"expected n between 1 and {limits.max_n}, found {n}.", "n")
        return n

    def sampling(
        self,
        prompt_tokens: int,
        context_tokens: int,
        vocab_size: int,
        defaults: dict[str, float],
        default_max_tokens: int | None,
    ) -> SamplingParams:
        """Sampling parameters for a prompt of known length. Raises RequestError.

        `defaults` come from the model's generation_config.
        """
        room = context_tokens - prompt_tokens
        asked = self.token_limit()
        if room < 1 or (asked is not None and asked > room):
            wanted = "left out" if asked is None else str(asked)
            raise ContextLengthError(
                f"The prompt has {prompt_tokens} tokens and {self.limit_param} is {wanted}; the "
                f"limit for both together is {context_tokens} tokens.",
                self.limit_param if room >= 1 else None,
            )
        if asked is None:
            asked = room if default_max_tokens is None else min(room, default_max_tokens)

        def value(name: str, neutral: float) -> float:
            given = getattr(self, name)
            return float(defaults.get(name, neutral) if given is None else given)

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
            logprobs=self.logprobs_count(),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )

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


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def token_limit(self) -> int | None:
        """max_completion_tokens is the newer name of max_tokens."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    def logprobs_count(self) -> int | None:
        """None unless `logprobs` is true."""
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
            return None
        return self.top_logprobs or 0


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], PlainValidator(_prompt)]
    """One text, or one list of token ids."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None

    def logprobs_count(self) -> int | None:
        """The number itself."""
        return self.logprobs


Body = TypeVar("Body", ChatRequest, CompletionRequest)


def parse_body(model: type[Body], body: bytes) -> Body:
    """A checked request from the bytes of a body. Raises RequestError naming the field at fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error) from error


def _request_error(error: ValidationError) -> RequestError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = min(faults, key=_importance)
    field = str(first["loc"][0]) if first["loc"] else None
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['msg']}.", None)
    if first["type"] == "extra_forbidden":
        names = [".".join(map(str, f["loc"])) for f in faults if f["type"] == "extra_forbidden"]
        listed = ", ".join(name[:80] for name in names[:5])
        return RequestError(f"Unsupported field: {listed}. Leave it out.", field)
    if not path:
        return RequestError(f"The body must be a JSON object: {first['msg']}.", None)
    return RequestError(f"{path[:120]}: {first['msg']}.", field)


def _importance(fault: Any) -> int:
    return {"json_invalid": 0, "extra_forbidden": 1}.get(fault["type"], 2)
