"""Prompts of a wanted length, made of words; the server's own count says how long they came out."""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = (
    "the a one this that old new good small long first last great little own other light dark "
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work night point "
    "home water room mother area money story fact month lot right study book eye job word house "
    "is was has does says goes can will makes takes sees comes wants looks uses finds gives tells "
    "of in to for with on at from by about into over after under again there here when where why"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class PromptLine:
    """Tokens of a prompt as a line over its words: `fixed` of the template, `each` per word."""

    fixed: float
    each: float

    @staticmethod
    def through(few: tuple[int, int], many: tuple[int, int]) -> PromptLine:
        """Through two measured points (words, tokens)."""
        each = (many[1] - few[1]) / (many[0] - few[0])
        return PromptLine(few[1] - each * few[0], each)

    def words(self, tokens: int) -> int:
        """Words whose prompt comes closest to `tokens`, at least one."""
        return max(1, round((tokens - self.fixed) / max(self.each, 0.1)))


def write_prompt(words: int, seed: int, number: int) -> str:
    """A text of that many words. Equal seed and number give an equal text; others differ from
    their first words on, so that no server finds one prompt's beginning in another."""
    random_numbers = random.Random(f"{seed} {number}")
    return " ".join(random_numbers.choices(_WORDS, k=words))
