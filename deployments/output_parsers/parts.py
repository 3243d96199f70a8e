"""What a model's text is made of, and the interface of everything that takes it apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text that the model's template marks as reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. `call` numbers the calls of one choice from 0."""

    call: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; joined, they are one JSON text."""

    call: int
    text: str


Part = ContentPart | ReasoningPart | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Takes one choice's text apart as it comes; bad model output becomes content."""

    def push(self, text: str) -> list[Part]:
        """The parts that became certain by more text."""

    def finish(self) -> list[Part]:
        """What was held back, at the end of the text."""
