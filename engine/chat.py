"""Chat without a server: template, tokens, text, by the model's own tokenizer files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from core.errors import CheckpointError, CoterieError, RequestError
from core.request import Request, SamplingParams
from engine.sampling_defaults import sampling_defaults

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(slots=True)
class Answer:
    """How the last answer ended."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None


class TextStream:
    """Token ids to text as they come. Text == decode of all ids, also when cut in a character."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a tokenizers.Tokenizer."""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._sent = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" inside a character."""
        self._ids.append(token_id)
        text: str = self._stream.step(self._tokenizer, token_id) or ""
        self._sent += len(text)
        return text

    def flush(self) -> str:
        """What was held back for a character that never became complete."""
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text[self._sent :]


class ChatSession:
    """Answers chat messages on an engine that nobody else steps."""

    def __init__(self, engine: Engine) -> None:
        """Raises CheckpointError where the model has no tokenizer or no chat template."""
        if not (engine.model_dir / "tokenizer.json").is_file():
            raise CheckpointError(
                f"expected a tokenizer.json in {engine.model_dir}, found none; chat needs one."
            )
        self._engine = engine
        self._tokenizer = AutoTokenizer.from_pretrained(engine.model_dir)
        if self._tokenizer.chat_template is None:
            raise CheckpointError(
                f"{engine.model_dir} has no chat template; only plain completion is possible."
            )
        self._defaults = sampling_defaults(engine.model_dir)
        self._numbers = itertools.count()
        self.last = Answer()

    def answer(self, messages: list[dict[str, Any]], **params: Any) -> Iterator[str]:
        """The answer's text, piece by piece. Closing the iterator cancels the rest.

        Raises RequestError at once for bad messages or parameters.
        """
        prompt_ids = self._encode(messages)
        room = self._engine.limits.context_tokens - len(prompt_ids)
        if room < 1:
            raise RequestError(
                f"The conversation has {len(prompt_ids)} tokens; the context served here is "
                f"{self._engine.limits.context_tokens}.",
                "messages",
            )
        merged = {"max_tokens": room, **self._defaults, **params}
        try:
            sampling = SamplingParams(**merged)
        except TypeError as error:
            raise RequestError(f"Unknown sampling parameter: {error}.") from error
        request = Request(
            request_id=f"chat-{next(self._numbers)}", prompt_ids=prompt_ids, params=sampling
        )
        self._engine.limits.check(request)
        self.last = Answer(prompt_tokens=len(prompt_ids))
        return self._stream(request)

    def _encode(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        try:
            encoding = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        # A template is a program over the messages: whatever it raises, it refused them.
        except Exception as error:
            raise RequestError(f"The chat template refused: {error}", "messages") from error
        return tuple(encoding["input_ids"])

    def _stream(self, request: Request) -> Iterator[str]:
        # Queued when the first piece is asked for: an iterator that nobody starts costs nothing.
        self._engine.add(request)
        request_id = request.request_id
        text = TextStream(self._tokenizer.backend_tokenizer)
        try:
            while self.last.finish_reason is None:
                for output in self._engine.step().outputs:
                    if output.request_id != request_id:
                        continue
                    self.last.completion_tokens = output.completion_tokens
                    self.last.finish_reason = output.finish_reason
                    for token_id in output.token_ids:
                        if piece := text.push(token_id):
                            yield piece
                    if output.error is not None:
                        raise CoterieError(output.error)
            if rest := text.flush():
                yield rest
        finally:
            self._engine.cancel(request_id)
