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
from deployments.model_files import open_tokenizer

_THREADS = 2
_SHORT_CHARS = 2_000
_VALUE_CHARS = 16
"""A message costs a template something even where it is empty."""

Result = TypeVar("Result")


class TokenizerWorker:
    """Renders and tokenises; texts short enough to be faster than a change of thread run inline."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")

    @classmethod
    def open(cls, model_dir: Path) -> TokenizerWorker:
        """The tokenizer and template of a model folder."""
        return cls(open_tokenizer(model_dir), ChatTemplate.open(model_dir))

    async def prompt_ids(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """Ids of a completion prompt; a text gets the special tokens that the tokenizer adds."""
        if not isinstance(prompt, str):
            return prompt
        return await self.run(len(prompt), lambda: self._encode(prompt, add_special=True))

    async def chat_ids(
        self, messages: list[dict[str, Any]], kwargs: dict[str, Any]
    ) -> tuple[int, ...]:
        """Ids of a chat prompt; the template writes its special tokens itself."""
        size = _size_chars(messages) + _size_chars(kwargs)

        def render_and_encode() -> tuple[int, ...]:
            return self._encode(self._template.render(messages, kwargs), add_special=False)

        return await self.run(size, render_and_encode)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, size_chars: int, work: Callable[[], Result]) -> Result:
        """The work's result; in a thread where as much text as that would hold the loop up."""
        if size_chars <= _SHORT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _encode(self, text: str, add_special: bool) -> tuple[int, ...]:
        try:
            # encode_batch lets other threads run; encode does not.
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special)[0]
        except UnicodeEncodeError as error:
            raise RequestError(f"The text holds no valid Unicode: {error}.", None) from error
        return tuple(encoding.ids)


def _size_chars(value: Any) -> int:
    """How much a template has to go through: all texts, and a flat charge for each value."""
    if isinstance(value, dict):
        return sum(len(key) + _size_chars(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(_size_chars(item) for item in value)
    return _VALUE_CHARS + (len(value) if isinstance(value, str) else 0)
