"""What counts as good service."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from core.config_model import ConfigModel


class ObjectiveSettings(ConfigModel):
    """Whatever trades latency against work decides by these two numbers."""

    ttft_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2000.0
    """Time to first token that a request should meet, in milliseconds."""
    tpot_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 200.0
    """Time per output token after the first that a request should meet, in milliseconds."""
