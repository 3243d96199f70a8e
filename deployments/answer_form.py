"""What an answer is to look like, as its request asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployments.output_parsers.parts import OutputParser
from deployments.prompt_text import PromptText


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """Everything about an answer that is known before the model runs."""

    chat: bool
    request_id: str
    model: str
    prompts: tuple[PromptText, ...]
    made: int = 1
    """Answers that the model gives to each prompt."""
    given: int = 1
    """The likeliest of them, which the client gets."""
    logprobs: bool = False
    prompt_logprobs: bool = False
    """Whether vLLM's `prompt_logprobs` are told."""
    echo: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    parser: Callable[[], OutputParser] | None = None
    """Makes the parser of one choice's text; None: all of it is content."""
    stops: bool = False
    """Whether there are stop strings: they may cut a call of a tool."""

    @property
    def choices(self) -> int:
        """Answers that the model gives in all; those to one prompt are neighbours."""
        return self.made * len(self.prompts)
