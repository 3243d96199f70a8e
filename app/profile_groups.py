"""The four groups of prompts that every profile runs: minimal, long context, code, perturbed.

Texts are made from small templates, so that none repeats another and nothing has to be shipped.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

REPEATS = 50
PERTURBED_ONE_IN = 20
"""One character in so many is replaced in the perturbed group."""

_PEOPLE = ("Ada", "Bo", "Chen", "Dana", "Emre", "Fatima", "Grace", "Hugo", "Ines", "Jun")
_PLACES = ("the harbour", "a mountain hut", "the old market", "a night train", "the library")
_THINGS = ("a lamp", "a letter", "two tickets", "an umbrella", "a broken radio", "a map")
_VERBS = ("lost", "found", "sold", "repaired", "painted", "forgot")
_NAMES = ("total", "items", "rows", "parts", "edges", "prices", "words")
_OPERATIONS = ("sum", "max", "min", "sorted", "len")


def _minimal(draw: random.Random) -> str:
    return draw.choice(("Hi", "Why?", "Yes.", "One", "Go on", "Thanks", "No", "Hello", "And?"))


def _sentence(draw: random.Random) -> str:
    who, where, what = draw.choice(_PEOPLE), draw.choice(_PLACES), draw.choice(_THINGS)
    return f"On day {draw.randint(1, 90)}, {who} {draw.choice(_VERBS)} {what} in {where}."


def _long_context(draw: random.Random) -> str:
    return " ".join(_sentence(draw) for _ in range(60)) + " Who was there on the first day?"


def _code(draw: random.Random) -> str:
    name, operation = draw.choice(_NAMES), draw.choice(_OPERATIONS)
    return (
        f"def {operation}_of_{name}({name}: list[int]) -> int:\n"
        f'    """Return {operation} of every value above {draw.randint(1, 99)}."""\n'
        f"    kept = [value for value in {name} if value > {draw.randint(1, 99)}]\n"
    )


def perturbed(text: str, draw: random.Random) -> str:
    """The text with one character in PERTURBED_ONE_IN replaced by a random letter."""
    letters = list(text)
    number = max(1, len(letters) // PERTURBED_ONE_IN)
    for at in draw.sample(range(len(letters)), number):
        letters[at] = draw.choice([x for x in string.ascii_letters if x != letters[at]])
    return "".join(letters)


def _perturbed(draw: random.Random) -> str:
    return perturbed(" ".join(_sentence(draw) for _ in range(4)), draw)


_GROUPS: dict[str, Callable[[random.Random], str]] = {
    "minimal": _minimal,
    "long context": _long_context,
    "code": _code,
    "perturbed": _perturbed,
}


def groups(repeats: int = REPEATS, seed: int = 0) -> dict[str, list[str]]:
    """`repeats` texts of each group; the same for the same seed."""
    return {
        name: [make(random.Random(f"{seed}-{name}-{at}")) for at in range(repeats)]
        for name, make in _GROUPS.items()
    }
