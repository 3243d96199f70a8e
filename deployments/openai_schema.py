"""What a request body may hold: strict models of the endpoints, and how a fault in one is told.

Fields of OpenAI's API come first, then the extensions that vLLM made common. A field that is not
listed is refused by name, so that nothing a client asks for is dropped in silence. Known fields
that are not served pass where their value changes nothing, and are refused with the reason else.
"""

from __future__ import annotations

from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import FailFast, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import from_json, to_json

from core.errors import RequestError
from deployments.field_kinds import Count, Label, Strict, TokenId, Unsupported, fault
from deployments.openai_messages import MAX_MESSAGES, Message
from deployments.sampling_fields import SamplingFields
from deployments.settings import ServingSettings
from deployments.tool_fields import ToolFields

MAX_PROMPTS = 4096
"""Prompts that a body is read for; the setting serving.max_prompts lies below."""

_NEAR = 0.8
"""How like a field that exists a name must be to be taken for a slip."""
_MANY_FAULTS = 256
"""Faults of a body that are listed at once; that costs some 10 us each, in native code that lets
nothing else run."""
_KEPT_KEYS = 128
"""More than any object of a body has fields: one that has more has an unknown one among them."""
_MAX_PARAM_CHARS = 120

Prompt = str | tuple[int, ...]
TopCount = Annotated[int, Field(ge=0, le=20)]


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or a list of them, each a text or a list of token ids; none may be empty."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token(value[0])):
        return (_prompt(value),)
    if not isinstance(value, list):
        raise fault("expected a text, a list of token ids, or a list of those")
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise fault(f"expected 1 to {MAX_PROMPTS} prompts, found {len(value)}")
    return tuple(_prompt(prompt) for prompt in value)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise fault("expected at least one character, found an empty text")
        return value
    if not isinstance(value, list):
        raise fault("expected a text, a list of token ids, or a list of those")
    if not value:
        raise fault("expected at least one token id, found an empty list")
    if not all(_is_token(token) for token in value):
        raise fault("expected token ids: whole numbers from 0 to 2147483647")
    return tuple(value)


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _metadata(value: Any) -> dict[str, str] | None:
    """OpenAI's labels of a stored answer: taken and not used, as nothing is stored."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > 16:
        raise fault("expected at most 16 pairs of texts")
    if not all(isinstance(text, str) and len(text) <= 512 for text in value.values()):
        raise fault("expected at most 16 pairs of texts of up to 512 characters")
    return value


_PROMPT_KINDS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
        },
    ]
}
_LABELS = {
    "type": ["object", "null"],
    "maxProperties": 16,
    "additionalProperties": {"type": "string", "maxLength": 512},
}


class ChatRequest(SamplingFields, ToolFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Values for the model's own chat template."""
    metadata: Annotated[
        dict[str, str] | None, PlainValidator(_metadata), WithJsonSchema(_LABELS)
    ] = None
    """Labels; taken and not used, as nothing is stored."""
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    """Taken and not used: equal prompt beginnings of a tenant are found without it."""
    store: Annotated[None, Unsupported("answers are not stored.", (False,))] = None
    modalities: Annotated[None, Unsupported("answers are text.", (["text"],))] = None
    audio: Annotated[None, Unsupported("answers are text.")] = None
    prediction: Annotated[None, Unsupported("there are no predicted outputs.")] = None
    verbosity: Annotated[None, Unsupported("ask for it in the messages.")] = None
    web_search_options: Annotated[None, Unsupported("there is no web search.")] = None
    moderation: Annotated[None, Unsupported("there is no moderation.")] = None
    prompt_cache_retention: Annotated[None, Unsupported("the cache holds what it can.")] = None
    functions: Annotated[None, Unsupported("its newer name is tools.")] = None
    function_call: Annotated[None, Unsupported("its newer name is tool_choice.")] = None
    chat_template: Annotated[None, Unsupported("a request cannot bring a template.")] = None
    echo: Annotated[None, Unsupported("only /v1/completions echoes.", (False,))] = None
    add_generation_prompt: Annotated[
        None, Unsupported("the answer is always the assistant's.", (True,))
    ] = None
    continue_final_message: Annotated[
        None, Unsupported("the answer is always a new turn.", (False,))
    ] = None
    add_special_tokens: Annotated[
        None, Unsupported("the template writes them itself.", (False,))
    ] = None

    @property
    def limit_param(self) -> str:
        """max_completion_tokens where that was given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def token_limit(self) -> int | None:
        """max_completion_tokens is the newer name of max_tokens. Raises RequestError."""
        newer = self.max_completion_tokens
        if newer is None:
            return self.max_tokens
        if self.max_tokens not in (None, newer):
            raise RequestError(
                f"max_completion_tokens ({newer}) and max_tokens ({self.max_tokens}) are two names "
                "of one limit; send one of them.",
                "max_completion_tokens",
            )
        return newer

    def logprobs_count(self) -> int | None:
        """None unless `logprobs` is true."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
            return None
        return self.top_logprobs or 0


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts), WithJsonSchema(_PROMPT_KINDS)]
    """A text, a list of token ids, or a list of those: choices are numbered through all."""
    logprobs: TopCount | None = None
    echo: bool | None = None
    """The prompt before the answer; max_tokens may be 0 then."""
    suffix: Annotated[None, Unsupported("no text can be put between two others.")] = None
    metadata: Annotated[
        dict[str, str] | None, PlainValidator(_metadata), WithJsonSchema(_LABELS)
    ] = None
    store: Annotated[None, Unsupported("answers are not stored.", (False,))] = None
    add_special_tokens: bool | None = None
    """Whether a text gets the special tokens that the tokenizer adds; left out: yes."""

    def check_prompts(self, limits: ServingSettings) -> None:
        """Raises RequestError for more prompts, times answers to each, than the limit."""
        count = len(self.prompt) * self.answers(limits)
        if len(self.prompt) > 1 and count > limits.max_prompts:
            raise RequestError(
                f"expected at most {limits.max_prompts} answers to a list of prompts, found "
                f"{len(self.prompt)} prompts with {self.answers(limits)} answers each.",
                "prompt",
            )

    def logprobs_count(self) -> int | None:
        """The number itself."""
        return self.logprobs

    def prompt_logprobs_count(self) -> int | None:
        """An echo with log-probabilities tells the prompt's too."""
        if self.prompt_logprobs is None and self.echo:
            return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs
        return self.prompt_logprobs

    @property
    def fewest_tokens(self) -> int:
        """An echo needs no answer."""
        return 0 if self.echo else 1


class TokenizeRequest(Strict):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: whether it gets those that the tokenizer adds; left out: yes."""
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Annotated[
        None, Unsupported("messages always end where the answer begins.", (True,))
    ] = None

    def check(self) -> None:
        """Raises RequestError unless there is either a prompt or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("expected either a prompt or messages.", "prompt")


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast(), Field(max_length=10_000_000)]


Body = TypeVar("Body", bound=Strict)


def parse_body(model: type[Body], body: bytes) -> Body:
    """A checked request from the bytes of a body. Raises RequestError naming the field at fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        found = error
    raise _request_error(model, _listable(model, body, found)) from found


def _listable(model: type[Body], body: bytes, error: ValidationError) -> ValidationError | int:
    """The error, or that of a shortened body where it holds too many faults; else their number."""
    for kept_items in (_KEPT_KEYS, 1):
        if error.error_count() <= _MANY_FAULTS:
            return error
        try:
            shortened = _shortened(from_json(body), kept_items)
            model.model_validate_json(to_json(shortened, inf_nan_mode="constants"))
        except ValidationError as of_shortened:
            error = of_shortened
        else:
            break
    return error if error.error_count() <= _MANY_FAULTS else error.error_count()


def _shortened(value: Any, kept_items: int) -> Any:
    """The beginnings of all objects and lists."""
    if isinstance(value, dict):
        keys = islice(value, _KEPT_KEYS)
        return {key: _shortened(value[key], kept_items) for key in keys}
    if isinstance(value, list):
        return [_shortened(item, kept_items) for item in value[:kept_items]]
    return value


def _request_error(model: type[Strict], error: ValidationError | int) -> RequestError:
    if isinstance(error, int):
        return RequestError(f"The body holds {error} values of a wrong kind.", None)
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = min(faults, key=_importance)
    field = str(first["loc"][0])[:_MAX_PARAM_CHARS] if first["loc"] else None
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {first['msg']}.", None)
    if first["type"] == "extra_forbidden":
        names = [".".join(map(str, f["loc"])) for f in faults if f["type"] == "extra_forbidden"]
        listed = ", ".join(name[:80] for name in names[:5])
        near = get_close_matches(names[0][:80], model.model_fields, 1, _NEAR)
        advice = f"Did you mean {near[0]}?" if near else "Leave it out."
        return RequestError(f"Unsupported field: {listed}. {advice}", field)
    if not path:
        return RequestError(f"The body must be a JSON object: {first['msg']}.", None)
    return RequestError(f"{path[:120]}: {first['msg']}.", field)


def _importance(fault: Any) -> int:
    return {"json_invalid": 0, "extra_forbidden": 1}.get(fault["type"], 2)
