"""The fields of a request that bind the form of its answer, and the structure they ask for.

`response_format` is OpenAI's. `structured_outputs` and the older `guided_*` fields are vLLM's.
The structure itself is checked where it is compiled, in the rank.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from core.errors import RequestError
from core.request import Structure, StructureKind
from deployments.field_kinds import Label, Strict

MAX_CHOICES = 10_000

Schema = dict[str, Any] | bool
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)
]


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema with a name, which changes nothing here."""

    name: Label = None
    description: Label = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None
    """Taken and not used: the schema is always held to."""


class JsonSchemaFormat(Strict):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Strict):
    """One form of the answer; exactly one field is given."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    """A grammar in EBNF, as llama.cpp and xgrammar read it."""
    structural_tag: dict[str, Any] | str | None = None
    """xgrammar's structural tag, or its text."""


class StructureFields(Strict):
    """The fields that bind the answer's form; one of them at most. None means: left out."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def structure_of(asked: StructureFields) -> Structure | None:
    """What the fields ask for, None for any text. Raises RequestError where they ask twice."""
    found = [*_of_response_format(asked), *_of_structured_outputs(asked), *_of_guided(asked)]
    if len(found) > 1:
        names = ", ".join(dict.fromkeys(structure.param or "" for structure in found))
        raise RequestError(
            f"expected one form of the answer, found {len(found)} (in {names}).", found[-1].param
        )
    return found[0] if found else None


def _of_response_format(asked: StructureFields) -> list[Structure]:
    form = asked.response_format
    if isinstance(form, JsonObjectFormat):
        return [Structure("json_object", param="response_format")]
    if isinstance(form, JsonSchemaFormat):
        return [_structure("json_schema", form.json_schema.schema_, "response_format")]
    return []


def _of_structured_outputs(asked: StructureFields) -> list[Structure]:
    given = asked.structured_outputs
    if given is None:
        return []
    param = "structured_outputs"
    found = _forms(given.json_, given.regex, given.choice, given.grammar, param)
    if given.json_object:
        found.append(Structure("json_object", param=param))
    if given.structural_tag is not None:
        found.append(_structure("structural_tag", given.structural_tag, param))
    if not found:
        raise RequestError(
            "expected one of json, json_object, regex, choice, grammar and structural_tag in "
            "structured_outputs, found none.",
            param,
        )
    return found


def _of_guided(asked: StructureFields) -> list[Structure]:
    return [
        *_forms(asked.guided_json, None, None, None, "guided_json"),
        *_forms(None, asked.guided_regex, None, None, "guided_regex"),
        *_forms(None, None, asked.guided_choice, None, "guided_choice"),
        *_forms(None, None, None, asked.guided_grammar, "guided_grammar"),
    ]


def _forms(
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    param: str,
) -> list[Structure]:
    given: list[tuple[StructureKind, Any]] = [
        ("json_schema", schema), ("regex", regex), ("choice", choice), ("ebnf", grammar),
    ]  # fmt: skip
    return [_structure(kind, value, param) for kind, value in given if value is not None]


def _structure(kind: StructureKind, value: Any, param: str) -> Structure:
    text = value if isinstance(value, str) else json.dumps(value)
    return Structure(kind, text, param)
