"""The one table from exception to HTTP status and OpenAI error, and the envelope around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core import errors
from core.errors import CoterieError, OverloadedError, RequestError
from deployments.text_delta import Failure


class ContextLengthError(RequestError):
    """Prompt and answer together are longer than what is served."""


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class BodyTooLargeError(RequestError):
    """The request body is larger than the limit."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one class of exceptions looks to a client."""

    status: int
    type: str
    code: str | None


_INVALID = "invalid_request_error"
_SERVER = "server_error"

TABLE: dict[type[Exception], ErrorKind] = {
    ModelNotFoundError: ErrorKind(404, _INVALID, "model_not_found"),
    ContextLengthError: ErrorKind(400, _INVALID, "context_length_exceeded"),
    BodyTooLargeError: ErrorKind(413, _INVALID, "body_too_large"),
    RequestError: ErrorKind(400, _INVALID, None),
    OverloadedError: ErrorKind(503, "overloaded_error", "overloaded"),
    errors.EngineUnavailableError: ErrorKind(503, _SERVER, "engine_unavailable"),
    errors.ExpertReadError: ErrorKind(500, _SERVER, "expert_unreadable"),
    errors.RoutingError: ErrorKind(500, _SERVER, "routing_failed"),
    errors.BudgetError: ErrorKind(500, _SERVER, "out_of_memory"),
    CoterieError: ErrorKind(500, _SERVER, "internal_error"),
    Exception: ErrorKind(500, _SERVER, "internal_error"),
}
"""An exception's kind is that of the first of its classes found here."""

HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}
_BY_NAME = {kind.__name__: kind for kind in TABLE}


def kind_of(error_class: type[BaseException]) -> ErrorKind:
    """The table's row for a class of exceptions."""
    for base in error_class.__mro__:
        if base in TABLE:
            return TABLE[base]
    return TABLE[Exception]


def error_object(
    message: str, kind: ErrorKind, param: str | None = None
) -> dict[str, dict[str, str | None]]:
    """The OpenAI error envelope."""
    return {
        "error": {"message": message, "type": kind.type, "param": param, "code": kind.code},
    }


def envelope(error: Exception) -> tuple[int, dict[str, dict[str, str | None]], dict[str, str]]:
    """(status, body, headers) of an exception. An unforeseen one keeps its text to the log."""
    kind = kind_of(type(error))
    foreseen = isinstance(error, CoterieError)
    message = str(error) if foreseen else "The server met an unforeseen error."
    param = error.param if isinstance(error, RequestError) else None
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif kind.status == 503:
        headers["retry-after"] = "5"
    return kind.status, error_object(message, kind, param), headers


def exception_of(failure: Failure) -> CoterieError:
    """The exception that a supervisor's Failure stands for."""
    if failure.error_type == OverloadedError.__name__:
        return OverloadedError(failure.message, failure.retry_after_s or 1.0)
    kind = _BY_NAME.get(failure.error_type, CoterieError)
    if issubclass(kind, RequestError):
        return kind(failure.message, failure.param)
    return (kind if issubclass(kind, CoterieError) else CoterieError)(failure.message)
