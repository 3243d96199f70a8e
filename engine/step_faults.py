"""Which parts of a step cannot be trusted, and why."""

from __future__ import annotations

from core.errors import ExpertReadError, RequestError, RoutingError
from core.request import Request
from core.step import PoolStepStats, StepPlan


def pool_faults(plan: StepPlan, stats: PoolStepStats) -> dict[int, Exception]:
    """Parts of the plan, by number, that hold a row whose routing or experts failed."""
    if not stats.bad_rows and not stats.failed_rows:
        return {}
    owner = [i for i, part in enumerate(plan.parts) for _ in part.token_ids]
    faults: dict[int, Exception] = {}
    for row in stats.failed_rows:
        faults[owner[row]] = ExpertReadError(
            "An expert that this request needs could not be read; it is quarantined."
        )
    for row in stats.bad_rows:
        faults[owner[row]] = RoutingError("A router's output is not finite for this request.")
    return faults


def param_at_fault(error: Exception, request: Request) -> str | None:
    """The request field that an error is about. What is refused late is so for its structure."""
    if not isinstance(error, RequestError):
        return None
    structure = request.params.structure
    return error.param or (structure.param if structure is not None else None)
