"""What a request must fit to be taken at all."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import BudgetError, RequestError
from core.model_shape import ModelShape
from core.request import Request
from engine.settings import EngineSettings
from expert_pool.host_memory import available_bytes


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
    scored_tokens: int
    """Longest prompt whose tokens' log-probabilities can be told."""

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
        if request.params.prompt_logprobs is not None and prompt > self.scored_tokens:
            raise RequestError(
                f"{asked}; this model takes a prompt in one part, so prompt_logprobs need one of "
                f"at most {self.scored_tokens} tokens.",
                "prompt_logprobs",
            )
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


def check_memory(shape: ModelShape, settings: EngineSettings, blocks: int) -> None:
    """Raises BudgetError before the operating system does it in its own way."""
    if settings.device != "cpu":
        return
    need = blocks * shape.kv_block_bytes(settings.kv_block_tokens) + settings.scratch_memory
    have = available_bytes()
    if need > have:
        raise BudgetError(
            f"KV pages and scratch need {need} bytes, this machine has {have} bytes free. "
            "Lower engine.kv_memory or engine.scratch_memory."
        )
