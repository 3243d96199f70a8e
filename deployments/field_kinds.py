"""The kinds of values that request bodies are made of, and how a wrong one is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

INT64 = 2**63 - 1
MAX_LIST = 1024
"""Most items of any list in a body that has no limit of its own."""

Count = Annotated[int, Field(ge=0, le=INT64)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Label = Annotated[str, Field(max_length=4096)] | None
"""A text of the caller's own that changes nothing here; taken and not used."""


class Strict(BaseModel):
    """An object whose fields are all known; values are never converted."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


def fault(message: str) -> PydanticCustomError:
    """What a validator raises: the message alone, without pydantic's own words."""
    return PydanticCustomError("coterie", "{message}", {"message": message})


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Marks a known field that is not served: null and the `harmless` values pass, no others."""

    reason: str
    harmless: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [*self.harmless, None], "description": f"No others: {self.reason}"}

    def _check(self, value: Any) -> None:
        known = any(value == item and type(value) is type(item) for item in self.harmless)
        if value is not None and not known:
            raise fault(f"not supported here: {self.reason}")
