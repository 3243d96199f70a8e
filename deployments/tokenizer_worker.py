"""Text to token ids, by one model's tokenizer and chat template."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from core.errors import RequestError
from deployments.chat_template import ChatTemplate
from deployments.model_files import open_pieces, open_tokenizer
from deployments.prompt_text import PromptText
from deployments.text_threads import LONG_CHARS, TextThreads
from engine.token_pieces import TokenPieces

_BEGINNING_CHARS = 16
"""For each token of the context, of a text that can hardly fit it: what is looked at first."""
_VALUE_CHARS = 16
"""A message costs a template something even where it is empty."""


class TokenizerWorker:
    """Renders and tokenises, long texts in threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        pieces: TokenPieces,
        threads: TextThreads,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pieces = pieces
        self._threads = threads

    @classmethod
    def open(cls, model_dir: Path, threads: TextThreads) -> TokenizerWorker:
        """The tokenizer and template of a model folder."""
        pieces = open_pieces(model_dir)
        return cls(open_tokenizer(model_dir), ChatTemplate.open(model_dir), pieces, threads)

    async def prompt(
        self,
        prompt: str | tuple[int, ...],
        add_special: bool = True,
        echo: bool = False,
        context_tokens: int | None = None,
    ) -> PromptText:
        """A completion prompt as ids; with `echo` also as text.

        A text gets the special tokens that the tokenizer adds, unless told otherwise. Of one that
        is clearly longer than `context_tokens` only the beginning is made ids of.
        """
        if isinstance(prompt, str):

            def encode() -> PromptText:
                return self._of_text(prompt, add_special, echo, context_tokens)

            return await self._threads.run(len(prompt), encode)
        if not echo:
            return PromptText(prompt)
        return await self._threads.run(len(prompt), lambda: PromptText.of_ids(self._pieces, prompt))

    async def chat(
        self,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any],
        own: dict[str, Any] | None = None,
        context_tokens: int | None = None,
    ) -> PromptText:
        """A chat prompt as ids, as in `prompt`; the template writes its special tokens itself."""

        def render_and_encode() -> PromptText:
            text = self._template.render(messages, kwargs, own)
            return self._of_text(text, add_special=False, context_tokens=context_tokens)

        return await self._threads.run(
            _size_chars([messages, kwargs, own or {}]), render_and_encode
        )

    async def text(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, special tokens by their names. Raises RequestError."""
        return await self._threads.run(len(ids), lambda: self._text(ids))

    async def token_texts(self, ids: tuple[int, ...]) -> list[str]:
        """Each token as the vocabulary names it."""

        def names() -> list[str]:
            return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

        return await self._threads.run(len(ids), names)

    def _text(self, ids: tuple[int, ...]) -> str:
        unknown = next((i for i in ids if self._tokenizer.id_to_token(i) is None), None)
        if unknown is not None:
            raise RequestError(f"There is no token with the id {unknown}.", "tokens")
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _of_text(
        self, text: str, add_special: bool, echo: bool = False, context_tokens: int | None = None
    ) -> PromptText:
        if context_tokens is not None and len(text) > 2 * _BEGINNING_CHARS * context_tokens:
            # Millions of tokens cost a minute and a gigabyte before they are refused.
            ids = self._encode(text[: _BEGINNING_CHARS * context_tokens], add_special).ids
            if len(ids) > 2 * context_tokens:
                return PromptText(tuple(ids), is_beginning=True)
        encoding = self._encode(text, add_special)
        if not echo:
            return PromptText(tuple(encoding.ids))
        return PromptText(tuple(encoding.ids), text, tuple(begin for begin, _ in encoding.offsets))

    def _encode(self, text: str, add_special: bool) -> Encoding:
        try:
            # encode_batch lets other threads run; encode does not.
            return self._tokenizer.encode_batch([text], add_special_tokens=add_special)[0]
        except UnicodeEncodeError as error:
            raise RequestError(f"The text holds no valid Unicode: {error}.", None) from error


def _size_chars(value: Any) -> int:
    """How much a template has to go through: all texts, and a flat charge for each value.

    Counted no further than to `LONG_CHARS`: what is beyond changes nothing.
    """
    size = 0
    open_values = [value]
    while open_values and size <= LONG_CHARS:
        value = open_values.pop()
        if isinstance(value, dict):
            size += sum(len(key) for key in islice(value, LONG_CHARS))
            open_values += value.values()
        elif isinstance(value, list):
            open_values += value
        else:
            size += _VALUE_CHARS + (len(value) if isinstance(value, str) else 0)
    return size
