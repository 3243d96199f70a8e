"""One sequence of a request: its tokens, how far they are computed, and the KV blocks it holds."""

from __future__ import annotations

from core.request import Request
from engine.kv_pages import chain_next, chain_start


class Sequence:
    """Mutable; the batcher moves it, the engine appends to it."""

    __slots__ = (
        "_hashes",
        "_salt",
        "arrived_s",
        "block_ids",
        "cached_tokens",
        "computed",
        "deadline_s",
        "first_token_s",
        "held",
        "index",
        "leader",
        "prompt_tokens",
        "request",
        "scored",
        "sequence_id",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        index: int,
        salt: str | None,
        leader: Sequence | None = None,
    ) -> None:
        """`salt` starts the hash chain of its blocks; None: its blocks are never shared.
        `leader` computes the same prompt first."""
        self.sequence_id = sequence_id
        """Rises with arrival: the smaller, the older."""
        self.request = request
        self.index = index
        self.leader = leader
        self.token_ids = list(request.prompt_ids)
        self.prompt_tokens = len(request.prompt_ids)
        self.computed = 0
        """Tokens whose keys and values lie in the pages."""
        self.block_ids: list[int] = []
        self.cached_tokens = 0
        self.held = False
        """Whether steps go on without it, until its structure says what may come next."""
        self.scored = 0
        """Prompt tokens whose logits gave the log-probability of the next one."""
        self.arrived_s = 0.0
        """When its request was accepted; this and the next two by the engine's clock."""
        self.first_token_s: float | None = None
        self.deadline_s: float | None = None
        """After which nobody wants the answer."""
        self._salt = salt
        self._hashes: list[bytes] = []

    @property
    def pending(self) -> int:
        """Tokens still to pass the model before the next one can be sampled."""
        return len(self.token_ids) - self.computed

    @property
    def generated(self) -> int:
        """Tokens sampled so far that are part of the sequence."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def to_score(self) -> int:
        """Prompt tokens whose logits are still to score the next one."""
        asked = self.index == 0 and self.request.params.prompt_logprobs is not None
        return self.prompt_tokens - 1 - self.scored if asked else 0

    @property
    def shares_blocks(self) -> bool:
        """Whether its blocks may be published and found."""
        return self._salt is not None

    @property
    def waits_for_leader(self) -> bool:
        """True until the prompt that it is to share has been computed, or its leader has ended."""
        leader = self.leader
        return leader is not None and leader.computed < leader.prompt_tokens

    def hashes(self, count: int, block_tokens: int) -> list[bytes]:
        """The chained hashes of its first `count` full blocks."""
        if self._salt is None:
            return []
        while len(self._hashes) < count:
            done = len(self._hashes)
            previous = self._hashes[-1] if done else chain_start(self._salt)
            tokens = self.token_ids[done * block_tokens : (done + 1) * block_tokens]
            self._hashes.append(chain_next(previous, tokens))
        return self._hashes[:count]
