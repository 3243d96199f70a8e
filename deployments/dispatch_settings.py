"""Settings of the dispatcher: how a request finds its replica. No torch, no Ray."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from core.config_model import ConfigModel

Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]


class DispatchSettings(ConfigModel):
    """Bounds of the dispatcher; what things cost it learns from the replicas' measured steps."""

    policy: Literal["experts", "least_loaded"] = "experts"
    """What decides where there are several replicas: the expected cost, experts and prefixes
    included, or the shorter queue of two alone (Serve's own router)."""
    report_period_s: Seconds = 0.5
    """How often a replica is asked where its experts lie and how loaded it is, in seconds."""
    report_limit_s: Seconds = 3.0
    """Requests sent to a replica show in its report within this many seconds; otherwise the report
    counts as old, and without fresh reports the less loaded of two replicas is taken."""
    report_lag_s: Annotated[float, Field(ge=0)] = 0.02
    """Requests that arrived less than this many seconds before a report was made are not yet in
    it."""
    tokens_ahead: Positive = 512
    """Most tokens of an answer that are reckoned with, however many a request may ask for."""
    affinity_share: Share = 0.6
    """How much of a replica's cost may be forgiven it for the experts and prefixes that it holds,
    as a share of that cost; 0 looks at load alone."""
    newcomer_tokens: Annotated[int, Field(ge=0)] = 4096
    """Tokens after which half of a new replica's benefit of the doubt is gone: until then its
    experts count as if they lay as well as on the best one."""
    remembered_prefixes: Positive = 65_536
    """Beginnings of prompts, and sessions, whose last replica a gateway remembers."""

    @model_validator(mode="after")
    def _limit_above_period(self) -> DispatchSettings:
        if self.report_limit_s < 2 * self.report_period_s:
            raise ValueError(
                f"report_limit_s ({self.report_limit_s}) is less than two report periods "
                f"({self.report_period_s} s each): every report would be old; raise it"
            )
        return self
