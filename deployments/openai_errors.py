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


class AccessError(RequestError):
    """The request has no key, or one that is not known here."""


class TenantLimitError(RequestError):
    """A tenant asks for more than it is given. `retry_after_s` says when to come back."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(RequestError):
    """The request's own deadline passed before its answer was complete."""


class OperatorCancelledError(RequestError):
    """An operator ended the request."""


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
    AccessError: ErrorKind(401, _INVALID, "invalid_api_key"),
    TenantLimitError: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"),
    # Clients try 408 again by themselves; what came too late once may come in time later.
    DeadlineError: ErrorKind(408, "timeout_error", "deadline_exceeded"),
    OperatorCancelledError: ErrorKind(403, _INVALID, "cancelled_by_operator"),
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
    if isinstance(error, OverloadedError | TenantLimitError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, AccessError):
        headers["www-authenticate"] = 'Bearer realm="coterie"'
    elif kind.status == 503:
        headers["retry-after"] = "5"
    return kind.status, error_object(message, kind, param), headers


def exception_of(failure: Failure) -> CoterieError:
    """The exception that a supervisor's Failure stands for."""
    for waits in (OverloadedError, TenantLimitError):
        if failure.error_type == waits.__name__:
            return waits(failure.message, failure.retry_after_s or 1.0)
    kind = _BY_NAME.get(failure.error_type, CoterieError)
    if issubclass(kind, RequestError):
        return kind(failure.message, failure.param)
    return (kind if issubclass(kind, CoterieError) else CoterieError)(failure.message)
