"""Chat messages to prompt text by the model's own template, in transformers' sandbox. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import RequestError
from deployments import model_files

RESERVED_KWARGS = frozenset(
    {"messages", "conversations", "chat_template", "tools", "documents", "add_generation_prompt"}
    | {"return_assistant_tokens_mask", "continue_final_message"}
)


class ChatTemplate:
    """The template of one model folder."""

    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    @classmethod
    def open(cls, model_dir: Path) -> ChatTemplate:
        """Read the template and the special tokens it may print."""
        return cls(model_files.chat_template(model_dir), model_files.special_tokens(model_dir))

    def render(
        self,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any],
        own: dict[str, Any] | None = None,
    ) -> str:
        """The prompt, ending where the assistant's turn begins.

        `kwargs` are the request's own arguments to the template, `own` those that the gateway
        makes of its fields (tools). Raises RequestError with the template's message when it
        refuses.
        """
        if self._source is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions with a prompt.", "messages"
            )
        if reserved := RESERVED_KWARGS & set(kwargs):
            raise RequestError(
                f"chat_template_kwargs may not name {', '.join(sorted(reserved))}.",
                "chat_template_kwargs",
            )
        try:
            rendered, _ = render_jinja_template(
                conversations=[messages],
                chat_template=self._source,
                add_generation_prompt=True,
                **{**self._special_tokens, **kwargs, **(own or {})},
            )
        # A template is a program over the request's values: whatever it raises, it refused them.
        except Exception as error:
            param = "chat_template_kwargs" if kwargs else "messages"
            raise RequestError(f"The chat template refused the request: {error}", param) from error
        return str(rendered[0])
