"""xgrammar as the engine uses it: its compiler for a vocabulary, and one matcher a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar

from core.errors import RequestError
from engine.grammar_source import GrammarSource
from engine.vocabulary import Vocabulary

_UNSPELLABLE = (
    "The structure asked for has no text that this model's vocabulary can begin with, or none at "
    "all."
)


class MatcherFactory:
    """Compiles for one vocabulary. Masks are made when they are first needed, not beforehand."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        """Raises CheckpointError for a model without a usable tokenizer."""
        vocabulary = Vocabulary.open(model_dir, vocab_size)
        self.special_texts = frozenset(vocabulary.special.values())
        # No stop ids: which ids end a sequence is the request's own matter, see StructureMatcher.
        info = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes),
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=[],
        )
        self.compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=True
        )
        self._usable = np.ones(vocab_size, dtype=bool)
        self._usable[list(vocabulary.special)] = False
        self._opens_surrogate = np.array([data[-1:] == b"\xed" for data in vocabulary.token_bytes])
        self._ends_surrogate = np.array(
            [b"\xa0" <= data[:1] <= b"\xbf" for data in vocabulary.token_bytes]
        )
        self._json_usable = self._usable.copy()
        self._json_usable[vocabulary.control_ids()] = False

    def matcher(
        self, grammar: Any, source: GrammarSource, end_ids: Iterable[int]
    ) -> StructureMatcher:
        """A matcher at the beginning of a text; `end_ids` end the sequence."""
        usable = self._json_usable if source.is_json else self._usable
        if source.token_ids:
            usable = usable.copy()
            usable[[token for token in source.token_ids if 0 <= token < len(usable)]] = True
        surrogates = (self._opens_surrogate, self._ends_surrogate)
        return StructureMatcher(grammar, usable, sorted(set(end_ids)), surrogates)

    def check_start(self, grammar: Any, source: GrammarSource) -> None:
        """Raises RequestError for a grammar that no token can begin."""
        self.matcher(grammar, source, ()).look()


class StructureMatcher:
    """Where one sequence stands in its structure, and which tokens may come next."""

    def __init__(
        self,
        grammar: Any,
        usable: np.ndarray,
        end_ids: list[int],
        surrogates: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """`usable` [V] is what may come at all. `surrogates` [V] tell tokens whose last byte may
        begin a UTF-16 surrogate, and tokens whose first byte would end it: xgrammar takes these
        for characters, UTF-8 does not."""
        self._grammar = grammar
        self._matcher: xgrammar.GrammarMatcher | None = None
        self._usable = usable
        self._end_ids = end_ids
        self._opens_surrogate, self._ends_surrogate = surrogates
        self._in_surrogate = False
        self._bits = xgrammar.allocate_token_bitmask(1, len(usable))
        self.forbidden: torch.Tensor | None = None
        """[V] bool: tokens that must not come next; None until `look`."""
        self.finished = False
        """Whether the structure is complete and nothing can follow."""

    def accept(self, token_id: int) -> None:
        """Takes a token. Raises RuntimeError for one that was forbidden."""
        if not self._started().accept_token(token_id):
            raise RuntimeError(f"token {token_id} does not continue the structure")
        self._in_surrogate = bool(self._opens_surrogate[token_id])

    def look(self) -> None:
        """Finds what may come next. An end is allowed where the structure may end, only there.

        Raises RequestError where the structure is incomplete and no token continues it.
        """
        matcher = self._started()
        matcher.fill_next_token_bitmask(self._bits, 0)
        packed = self._bits.numpy().view(np.uint8)[0]
        allowed = np.unpackbits(packed, count=len(self._usable), bitorder="little").view(bool)
        allowed &= self._usable
        if self._in_surrogate:
            allowed &= ~self._ends_surrogate
        allowed[self._end_ids] = False
        complete = matcher.is_completed()
        goes_on = bool(allowed.any())
        if not (complete or goes_on):
            raise RequestError(_UNSPELLABLE)
        self.finished = complete and not goes_on
        if complete:
            allowed[self._end_ids] = True
        self.forbidden = torch.from_numpy(~allowed)

    def _started(self) -> xgrammar.GrammarMatcher:
        # Not where it is made, in the step loop: even the first states of a grammar can take long.
        if self._matcher is None:
            self._matcher = xgrammar.GrammarMatcher(self._grammar)
        return self._matcher
