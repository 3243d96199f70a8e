"""From what a request asks to what the grammar compiler reads: checked, and only the enforceable.

No torch and no xgrammar here: `compile_source` is given the compiler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import msgspec

from core.errors import RequestError
from core.request import Structure
from engine.json_schema import MAX_DEPTH, enforceable
from engine.pattern_check import check_pattern

MAX_STRUCTURE_CHARS = 512 * 1024
MAX_CHOICES = 10_000
_MAX_SPACES = 16
"""White space between two values of a JSON text: a model that likes it must come to an end."""
_TAG_KINDS = frozenset(
    {
        "any_text", "any_tokens", "const_string", "dispatch", "exclude_token", "grammar",
        "json_schema", "optional", "or", "plus", "qwen_xml_parameter", "regex", "repeat",
        "sequence", "star", "tag", "tags_with_separator", "token", "token_dispatch",
        "token_triggered_tags", "triggered_tags",
    }
)  # fmt: skip
"""Parts of a structural tag whose fields are known here: no schema passes in another unseen."""
_FREE_KINDS = frozenset(
    {
        "any_text", "any_tokens", "dispatch", "exclude_token", "grammar", "qwen_xml_parameter",
        "regex", "token_dispatch", "token_triggered_tags", "triggered_tags",
    }
)  # fmt: skip
"""Those that let text come that is not JSON's."""
_PLACE = re.compile(r"^\[[\d:]+\]\s+\S+\.\w+:\d+:\s*")


class GrammarSource(msgspec.Struct, frozen=True):
    """What is compiled."""

    kind: str
    """json_schema, regex, ebnf or structural_tag."""
    text: str
    is_json: bool = False
    """Whether raw control characters never belong into the text."""
    token_ids: tuple[int, ...] = ()
    """Special tokens that it names by their ids."""


def grammar_source(structure: Structure, special_texts: Collection[str]) -> GrammarSource:
    """The checked source of a structure. Raises RequestError.

    `special_texts` are the names of the special tokens.
    """
    kind, text = structure.kind, structure.text
    if len(text) > MAX_STRUCTURE_CHARS:
        raise RequestError(
            f"expected a structure of at most {MAX_STRUCTURE_CHARS} characters, found {len(text)}."
        )
    if kind == "json_object":
        return GrammarSource("json_schema", '{"type":"object"}', True)
    if kind == "json_schema":
        return GrammarSource(kind, json.dumps(enforceable(_json(text))), True)
    if kind == "choice":
        return GrammarSource("structural_tag", _choice_tag(_json(text)))
    if kind == "structural_tag":
        return _TagChecker(special_texts).source(_json(text))
    if kind == "regex":
        check_pattern(text, "regex")
    elif kind != "ebnf":
        raise RequestError(f"expected a known kind of structure, found {kind!r}.")
    return GrammarSource(kind, text)


def compile_source(compiler: Any, source: GrammarSource) -> Any:
    """The xgrammar.CompiledGrammar of a source. Raises RequestError with the compiler's words."""
    try:
        if source.kind == "json_schema":
            return compiler.compile_json_schema(
                source.text, strict_mode=False, max_whitespace_cnt=_MAX_SPACES
            )
        if source.kind == "regex":
            return compiler.compile_regex(source.text)
        if source.kind == "ebnf":
            return compiler.compile_grammar(source.text)
        return compiler.compile_structural_tag(source.text)
    # The library raises RuntimeError and its own kinds for any fault in what it is given.
    except Exception as error:
        said = _PLACE.sub("", str(error).strip())[:400]
        raise RequestError(f"The structure asked for cannot be compiled: {said}") from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"expected a structure in JSON: {error}.") from error


def _choice_tag(choices: Any) -> str:
    if (
        not isinstance(choices, list)
        or not 1 <= len(choices) <= MAX_CHOICES
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise RequestError(f"expected 1 to {MAX_CHOICES} texts to choose from, none of them empty.")
    elements = [{"type": "const_string", "value": choice} for choice in dict.fromkeys(choices)]
    chosen = elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
    return json.dumps({"type": "structural_tag", "format": chosen})


class _TagChecker:
    """Checks every schema and expression in a structural tag as one of its own would be."""

    def __init__(self, special_texts: Collection[str]) -> None:
        self._special_texts = special_texts
        self._token_ids: set[int] = set()
        self._is_json = True

    def source(self, tag: Any) -> GrammarSource:
        """The checked tag."""
        if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
            raise RequestError('expected a structural tag with "type": "structural_tag".')
        if "format" not in tag or "structures" in tag:
            raise RequestError(
                'expected the "format" of a structural tag; its former "structures" are not taken.'
            )
        checked = {"type": "structural_tag", "format": self._checked(tag["format"], 1)}
        text = json.dumps(checked)
        return GrammarSource("structural_tag", text, self._is_json, tuple(sorted(self._token_ids)))

    def _checked(self, part: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise RequestError(f"expected a structural tag of at most {MAX_DEPTH} levels.")
        if isinstance(part, list):
            return [self._checked(item, depth + 1) for item in part]
        if not isinstance(part, dict):
            return part
        kind = part.get("type")
        # The compiler guesses the type of a part that names none.
        if not isinstance(kind, str) or kind not in _TAG_KINDS:
            raise RequestError(
                f"expected a known type of each part of a structural tag, found {kind!r}."
            )
        if kind in _FREE_KINDS:
            self._is_json = False
        if kind == "grammar" and part.get("syntax", "ebnf") != "ebnf":
            # Lark's language has schemas and special tokens of its own.
            raise RequestError("expected a grammar in EBNF in a structural tag.")
        if kind == "qwen_xml_parameter" and "json_schema" in part:
            return {**part, "json_schema": enforceable(part["json_schema"])}
        if kind == "json_schema" and "json_schema" in part:
            style = part.get("style", "json")
            self._is_json &= style == "json"
            spaces = {"max_whitespace_cnt": _MAX_SPACES} if style == "json" else {}
            return {**spaces, **part, "json_schema": enforceable(part["json_schema"])}
        if kind == "regex":
            check_pattern(part.get("pattern"), "regex")
        if kind == "any_text" and isinstance(part.get("excludes"), list):
            # A text that is one special token cannot come in other tokens' text; were it named
            # here, the compiler would take any bytes for text, those of special tokens too.
            kept = [text for text in part["excludes"] if text not in self._special_texts]
            return {**part, "excludes": kept}
        if kind == "token" and type(part.get("token")) is int:
            self._token_ids.add(part["token"])
        return {key: self._checked(value, depth + 1) for key, value in part.items()}
