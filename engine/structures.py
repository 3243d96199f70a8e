"""Structured sequences of an engine: grammars compiled aside, then one mask for each token.

A sequence waits outside of the batcher for its grammar. Between a token and the next mask it is
held: the step goes on without it, unless the mask comes within a few milliseconds.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import CoterieError, OverloadedError, RequestError
from engine.grammar_cache import Grammar, GrammarCache
from engine.mask_lanes import Look, MaskLanes
from engine.sampler import SamplingState
from engine.sequence import Sequence
from engine.settings import EngineSettings

if TYPE_CHECKING:
    from engine.structure_matcher import StructureMatcher

_PATIENCE_S = 0.005
"""How long a step waits for masks before it goes on without their sequences."""
_IDLE_S = 0.02
"""How long a step waits where there is nothing else to do."""
_SLOW_S = 0.05
"""Time of a look from which a sequence goes to the slow lane."""
_MAX_STUCK = 4
"""Looks given up that still run, from which no new structure is taken."""


@dataclass(slots=True)
class Settled:
    """What has become of structured sequences since the last step."""

    ready: list[Sequence] = field(default_factory=list)
    """Their first mask is there: they can be queued."""
    finished: list[Sequence] = field(default_factory=list)
    """Their structure is complete and nothing can follow."""
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Bound:
    """A structured sequence; without a matcher while its grammar is compiled."""

    sequence: Sequence
    state: SamplingState
    grammar: Grammar
    matcher: StructureMatcher | None = None
    look: Look | None = None
    """The look under way."""
    queued: bool = False
    """Whether the batcher has it."""
    slow: bool = False
    over: bool = False


class Structures:
    """Belongs to the step loop's thread; workers only put news into its inbox."""

    def __init__(self, model_dir: Path, vocab_size: int, settings: EngineSettings) -> None:
        """Costs nothing until the first structured request."""
        self._token_limit_s = settings.structure_token_s
        self._inbox: queue.SimpleQueue[Grammar | Look] = queue.SimpleQueue()
        self._lanes = MaskLanes(self._inbox.put)
        self._bound: dict[int, _Bound] = {}
        self._abandoned: list[tuple[Look, bool]] = []
        """Looks of sequences that left, and whether in the slow lane: they may hold a thread."""
        self.cache = GrammarCache(
            model_dir,
            vocab_size,
            settings.structure_compile_s,
            settings.structure_cache_memory,
            self._inbox.put,
        )

    @property
    def waiting(self) -> int:
        """Sequences that the batcher does not have yet."""
        return sum(not bound.queued for bound in self._bound.values())

    def start(self, sequence: Sequence, state: SamplingState) -> bool:
        """Take a new sequence with a structure; `settle` says when it can be queued.

        False where it has none, and can be queued at once.
        """
        structure = state.params.structure
        if structure is None:
            return False
        try:
            if self._lanes.stuck >= _MAX_STUCK:
                raise OverloadedError("too many structures take too long; come back later.", 5.0)
            grammar = self.cache.get(structure)
        except OverloadedError as error:
            grammar = Grammar(structure)
            grammar.error, grammar.done = error, True
        self._bound[sequence.sequence_id] = _Bound(sequence, state, grammar)
        if grammar.done:
            self._inbox.put(grammar)
        return True

    def advance(self, sequence: Sequence, token_id: int) -> None:
        """A token became part of a sequence; where it has a structure, it is held until settled."""
        bound = self._bound.get(sequence.sequence_id)
        if bound is not None and bound.matcher is not None:
            self._look(bound, bound.matcher, token_id)

    def leave(self, sequence: Sequence) -> bool:
        """Forget a sequence that ends. True where the batcher never had it."""
        bound = self._bound.pop(sequence.sequence_id, None)
        if bound is not None and bound.look is not None:
            bound.look.dropped = True
            self._abandoned.append((bound.look, bound.slow))
        return bound is not None and not bound.queued

    def settle(self, others_run: bool) -> Settled:
        """Takes the news; waits a little for masks, and longer if nothing else is to be done.

        `others_run`: whether a step would do anything without structured sequences.
        """
        settled = Settled()
        if not (self._bound or self._abandoned):
            return settled
        deadline = time.monotonic() + _PATIENCE_S
        while self._take(settled, deadline - time.monotonic() if self._is_held else 0.0):
            continue
        idle = not (others_run or settled.ready or settled.finished or settled.failed)
        held = all(b.look is not None or not b.queued for b in self._bound.values())
        if self._bound and idle and held:
            self._take(settled, _IDLE_S)
        self._expire(settled)
        return settled

    def close(self) -> None:
        """End the compilers; threads end when they notice."""
        self.cache.close()
        self._lanes.close()

    @property
    def _is_held(self) -> bool:
        """Whether a look is under way that is worth waiting for."""
        return any(bound.look is not None and not bound.slow for bound in self._bound.values())

    def _take(self, settled: Settled, wait_s: float) -> bool:
        """One piece of news, if there is some within this time."""
        try:
            news = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return False
        if isinstance(news, Grammar):
            for bound in [b for b in self._bound.values() if b.grammar is news]:
                self._begin(bound, settled)
        else:
            self._looked(news, settled)
        return True

    def _begin(self, bound: _Bound, settled: Settled) -> None:
        grammar = bound.grammar
        if bound.matcher is not None or bound.over:
            return
        if grammar.error is not None or grammar.source is None:
            self._fail(bound, grammar.error or CoterieError("a grammar is missing"), settled)
            return
        try:
            bound.matcher = self.cache.factory.matcher(
                grammar.compiled, grammar.source, bound.state.end_ids
            )
            self._look(bound, bound.matcher, None)
        # Whatever it is, it must not end the step of all the others.
        except Exception as error:
            self._fail(bound, error, settled)

    def _look(self, bound: _Bound, matcher: StructureMatcher, token_id: int | None) -> None:
        bound.sequence.held = True
        bound.look = Look(bound.sequence.sequence_id, matcher, token_id)
        self._lanes.submit(bound.look, bound.slow)

    def _looked(self, look: Look, settled: Settled) -> None:
        bound = self._bound.get(look.owner)
        if bound is None or bound.look is not look or bound.matcher is None:
            return  # it ended meanwhile
        bound.look = None
        bound.sequence.held = False
        # The first look makes masks that all later ones share.
        bound.slow = bound.slow or (bound.queued and look.took_s > _SLOW_S)
        if look.error is not None:
            self._fail(bound, look.error, settled)
        elif bound.matcher.finished:
            settled.finished.append(bound.sequence)
        else:
            bound.state.forbidden = bound.matcher.forbidden
            if not bound.queued:
                bound.queued = True
                settled.ready.append(bound.sequence)

    def _expire(self, settled: Settled) -> None:
        self._abandoned = [
            (look, slow)
            for look, slow in self._abandoned
            if not (look.done or (self._is_late(look) and self._lanes.give_up(look, slow)))
        ]
        for bound in list(self._bound.values()):
            look = bound.look
            if look is None or not self._is_late(look):
                continue
            if not self._lanes.give_up(look, bound.slow):
                continue  # it came just now: its news is for the next take
            error = RequestError(
                f"The structure asked for takes more than {self._token_limit_s:g} s a token; use a "
                "simpler one."
            )
            self._fail(bound, error, settled)

    def _is_late(self, look: Look) -> bool:
        # Its time runs from when a thread took it.
        began_s = look.began_s
        return began_s is not None and time.monotonic() - began_s >= self._token_limit_s

    @staticmethod
    def _fail(bound: _Bound, error: Exception, settled: Settled) -> None:
        bound.look = None
        bound.over = True
        settled.failed.append((bound.sequence, error))
