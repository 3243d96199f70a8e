from __future__ import annotations

import inspect

import pytest

from core import errors
from core.errors import CoterieError, EngineUnavailableError, OverloadedError, RequestError
from deployments.openai_errors import (
    TABLE,
    ContextLengthError,
    TenantLimitError,
    envelope,
    exception_of,
    kind_of,
)
from deployments.text_delta import Failure

OURS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, CoterieError)
]


@pytest.mark.parametrize("kind", OURS)
def test_every_error_of_ours_has_a_status(kind: type[CoterieError]) -> None:
    row = kind_of(kind)
    assert 400 <= row.status < 600 and row.type
    assert (row.status < 500) == issubclass(kind, RequestError)


def test_a_subclass_has_its_own_row_or_its_bases() -> None:
    class Special(RequestError):
        pass

    assert kind_of(Special) is TABLE[RequestError]
    assert kind_of(ContextLengthError).code == "context_length_exceeded"


def test_an_unforeseen_error_keeps_its_text_to_the_log() -> None:
    status, body, _ = envelope(ZeroDivisionError("secret"))
    assert status == 500 and "secret" not in str(body)


def test_retry_after_is_whole_seconds() -> None:
    status, _, headers = envelope(OverloadedError("full", 2.2))
    assert (status, headers["retry-after"]) == (503, "3")
    assert "retry-after" in envelope(EngineUnavailableError("gone"))[2]


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no", "n"),
        OverloadedError("full", 7.0),
        TenantLimitError("spent", 9.0),
        EngineUnavailableError("gone"),
    ],
)
def test_a_failure_stands_for_the_exception_it_was_made_of(error: CoterieError) -> None:
    back = exception_of(Failure.of(error))
    assert type(back) is type(error) and envelope(back) == envelope(error)


def test_an_unknown_failure_is_a_server_error() -> None:
    assert envelope(exception_of(Failure(error_type="Nobody", message="x")))[0] == 500
    assert envelope(exception_of(Failure(error_type="Exception", message="x")))[0] == 500
