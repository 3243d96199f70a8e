"""Text to token ids in a bounded pool of threads, so that no long text blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from core.errors import RequestError
from deployments.chat_template import ChatTemplate
from deployments.model_files import open_pieces, open_tokenizer
from deployments.prompt_text import PromptText
from engine.token_pieces import TokenPieces

_THREADS = 2
_SHORT_CHARS = 2_000
_VALUE_CHARS = 16
"""A message costs a template something even where it is empty."""

Result = TypeVar("Result")


class TokenizerWorker:
    """Renders and tokenises; texts short enough to be faster than a change of thread run inline."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, pieces: TokenPieces) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pieces = pieces
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")

    @classmethod
    def open(cls, model_dir: Path) -> TokenizerWorker:
        """The tokenizer and template of a model folder."""
        pieces = open_pieces(model_dir)
        return cls(open_tokenizer(model_dir), ChatTemplate.open(model_dir), pieces)

    async def prompt(
        self, prompt: str | tuple[int, ...], add_special: bool = True, echo: bool = False
    ) -> PromptText:
        """A completion prompt as ids; with `echo` also as text.

        A text gets the special tokens that the tokenizer adds, unless told otherwise.
        """
        if isinstance(prompt, str):
            return await self.run(len(prompt), lambda: self._of_text(prompt, add_special, echo))
        if not echo:
            return PromptText(prompt)
        return await self.run(len(prompt), lambda: PromptText.of_ids(self._pieces, prompt))

    async def chat_ids(
        self,
        messages: list[dict[str, Any]],
        kwargs: dict[str, Any],
        own: dict[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Ids of a chat prompt; the template writes its special tokens itself."""
        size = _size_chars(messages) + _size_chars(kwargs) + _size_chars(own or {})

        def render_and_encode() -> tuple[int, ...]:
            text = self._template.render(messages, kwargs, own)
            return self._of_text(text, add_special=False).ids

        return await self.run(size, render_and_encode)

    async def text(self, ids: tuple[int, ...]) -> str:
        """The text of token ids, special tokens by their names. Raises RequestError."""
        return await self.run(len(ids), lambda: self._text(ids))

    def token_texts(self, ids: tuple[int, ...]) -> list[str]:
        """Each token as the vocabulary names it."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, size_chars: int, work: Callable[[], Result]) -> Result:
        """The work's result; in a thread where as much text as that would hold the loop up."""
        if size_chars <= _SHORT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _text(self, ids: tuple[int, ...]) -> str:
        unknown = next((i for i in ids if self._tokenizer.id_to_token(i) is None), None)
        if unknown is not None:
            raise RequestError(f"There is no token with the id {unknown}.", "tokens")
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _of_text(self, text: str, add_special: bool, echo: bool = False) -> PromptText:
        try:
            # encode_batch lets other threads run; encode does not.
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special)[0]
        except UnicodeEncodeError as error:
            raise RequestError(f"The text holds no valid Unicode: {error}.", None) from error
        if not echo:
            return PromptText(tuple(encoding.ids))
        return PromptText(tuple(encoding.ids), text, tuple(begin for begin, _ in encoding.offsets))


def _size_chars(value: Any) -> int:
    """How much a template has to go through: all texts, and a flat charge for each value."""
    if isinstance(value, dict):
        return sum(len(key) + _size_chars(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(_size_chars(item) for item in value)
    return _VALUE_CHARS + (len(value) if isinstance(value, str) else 0)
