"""The errors that cross rooms. Each says what was expected, what was found, and what to do.

`deployments/openai_errors.py` holds the one table from these classes to HTTP status and code.
"""


class CoterieError(Exception):
    """Base of every error that Coterie raises on purpose."""


class SettingsError(CoterieError):
    """A setting is unknown, misplaced, out of range, or contradicts another."""


class CheckpointError(CoterieError):
    """A model folder is incomplete, unreadable, unsupported or holds what nobody reads."""


class BudgetError(CoterieError):
    """Memory does not suffice. The message names need and have, both in bytes."""


class RequestError(CoterieError):
    """One request asks for what cannot be done; nothing else is harmed.

    `param` is the request field at fault, where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ExpertReadError(CoterieError):
    """An expert's bytes could not be read, or failed their checksum twice (quarantined)."""


class RoutingError(CoterieError):
    """A router produced NaN, infinity, or an expert index outside 0..E-1 for a request's tokens."""


class OverloadedError(CoterieError):
    """The queue is full. `retry_after_s` says when to come back."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(CoterieError):
    """The engine of a replica died, hangs, or is not ready; it is being made again."""
