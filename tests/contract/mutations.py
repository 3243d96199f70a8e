"""Bodies that go wrong in every way at once: seeded mutations of ones that are right."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1e-300, 1e300, -0.0, 0.5, 2**31, 2**63, -(2**63) - 1, 10**30,
    "", " ", "x", "\x00", "\ud800", "\U0001f98a", "null", "NaN", "a" * 5000, "\n" * 300, "../../x",
    [], {}, [[]], [{}], [None], [1, "x"], ["x"] * 40, {"": ""}, {"a": {"b": {"c": []}}}, [-1],
    [0, 1, 2], [10**9], {"type": "text"}, {"type": "json_object"}, {"role": "user"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    {"include_usage": True}, {"5": 1}, {"regex": "(("}, {"choice": []},
)  # fmt: skip
NAMES = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "n", "best_of", "stream", "stream_options", "stop", "logprobs",
    "top_logprobs", "prompt_logprobs", "echo", "suffix", "seed", "logit_bias", "user", "tools",
    "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "min_tokens", "ignore_eos", "stop_token_ids", "chat_template",
    "chat_template_kwargs", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "service_tier", "metadata", "store", "modalities", "role", "content", "name", "type", "add",
    "__class__", "constructor", "", "\u0000",
)  # fmt: skip
CONTENT_TYPES = ("application/json",) * 12 + ("text/plain", "", "application/json; charset=x")


@dataclass(frozen=True, slots=True)
class Wrong:
    """One request: where it goes, its bytes, and what it calls them."""

    path: str
    content: bytes
    content_type: str


def mutated(seeds: list[tuple[str, dict[str, Any]]], seed: int, count: int) -> Iterator[Wrong]:
    """`count` requests of one random seed. A few are still right; that is well."""
    random_numbers = random.Random(seed)
    paths = sorted({path for path, _ in seeds})
    for _ in range(count):
        path, body = random_numbers.choice(seeds)
        value: Any = copy.deepcopy(body)
        for _ in range(random_numbers.choice((1, 1, 1, 2, 3))):
            value = _mutate(value, random_numbers)
        content = _encode(value, random_numbers)
        if random_numbers.random() < 0.1:
            content = _damage(content, random_numbers)
        if random_numbers.random() < 0.05:
            path = random_numbers.choice(paths)
        yield Wrong(path, content, random_numbers.choice(CONTENT_TYPES))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _mutate(value: Any, random_numbers: random.Random) -> Any:
    places = list(_places(value))
    if not places or random_numbers.random() < 0.02:
        return copy.deepcopy(random_numbers.choice(ODD_VALUES))
    container, key = random_numbers.choice(places)
    odd = copy.deepcopy(random_numbers.choice(ODD_VALUES))
    kind = random_numbers.choice(("replace", "replace", "replace", "add", "add", "remove", "wrap"))
    if kind == "replace":
        container[key] = odd
    elif kind == "wrap":
        container[key] = random_numbers.choice(([container[key]], {"x": container[key]}))
    elif kind == "remove":
        del container[key]
    elif isinstance(container, list):
        container.insert(random_numbers.randrange(len(container) + 1), odd)
    else:
        container[random_numbers.choice(NAMES)] = odd
    return value


def _encode(value: Any, random_numbers: random.Random) -> bytes:
    # Escapes keep lone surrogates and NUL sendable; without them they are damage of their own.
    if random_numbers.random() < 0.8:
        return json.dumps(value).encode()
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _damage(content: bytes, random_numbers: random.Random) -> bytes:
    place = random_numbers.randrange(max(1, len(content)))
    byte = bytes([random_numbers.randrange(256)])
    return random_numbers.choice(
        (
            content[:place],
            content[:place] + byte + content[place + 1 :],
            content + content,
            b"[" * 50_000,
            b'{"a":' * 20_000,
            b"",
            b"\xff\xfe" + content,
            content.replace(b":", b":1", 1),
        )
    )
