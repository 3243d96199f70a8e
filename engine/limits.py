"""What a request must fit to be taken at all."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import RequestError
from core.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed at start, by the settings and the model."""

    context_tokens: int
    """Prompt and answer together."""
    max_sequences: int
    """Sequences that run at once."""
    kv_blocks: int
    kv_block_tokens: int
    vocab_size: int

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that can never run, saying what it asks and may ask."""
        prompt, answer = len(request.prompt_ids), request.params.max_tokens
        asked = f"The prompt has {prompt} tokens and max_tokens is {answer}"
        if prompt + answer > self.context_tokens:
            raise RequestError(
                f"{asked}; together they may be at most {self.context_tokens} tokens, the context "
                "served here.",
                "messages" if prompt >= self.context_tokens else "max_tokens",
            )
        room = self.kv_blocks * self.kv_block_tokens
        if prompt > room:
            raise RequestError(f"{asked}; the KV pages hold at most {room} tokens.", "messages")
        for param, ids in (
            ("prompt", request.prompt_ids),
            ("logit_bias", [token for token, _ in request.params.logit_bias]),
            ("stop_token_ids", request.params.stop_token_ids),
        ):
            wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
            if wrong is not None:
                raise RequestError(
                    f"Token ids must lie between 0 and {self.vocab_size - 1}, found {wrong}.",
                    param,
                )
