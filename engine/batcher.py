"""Continuous batching: which sequences decode and which prompt parts prefill in the next step.

Decoding sequences go first and always fit; prompt parts fill what is left of the token budget, so
prefill never starves decode. Who waits is admitted in the order of arrival, or as an
`AdmissionOrder` says, who lets nobody be overtaken without bound. A prompt's blocks are taken when
it is admitted; a decoding sequence takes one block at a time and, where none is free, sends
the youngest sequence back to wait and be computed again.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from core.step import SequencePart, StepPlan
from engine.batch_size import BatchLimit, BatchSizer
from engine.coherent_admission import AdmissionOrder
from engine.kv_pages import KvPages
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """A planned step with the sequences behind its parts."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    """One for each part of the plan."""
    outgrown: tuple[Sequence, ...]
    """Sequences that alone need more KV blocks than exist; already removed."""
    preemptions: int
    prefix_hit_tokens: int


class Batcher:
    """Holds the waiting and the running sequences. Not thread-safe; no clock, no torch."""

    def __init__(
        self,
        pages: KvPages,
        max_sequences: int,
        max_step_tokens: int,
        whole_prompts: bool = False,
        max_scored_tokens: int | None = None,
        pass_tokens: int = 0,
        pass_sequences: int | None = None,
        sizer: BatchSizer | None = None,
        order: AdmissionOrder | None = None,
    ) -> None:
        """`whole_prompts`: a prompt passes in one part, even beyond `max_step_tokens`.
        `max_scored_tokens`: most prompt tokens of a step whose logits are wanted.
        `pass_tokens`, `pass_sequences`: most tokens and sequences of a layer-major pass, which
        takes the prompts that do not fit one step; 0 tokens for none.
        `sizer`: bounds each step further; without one, each is as large as may be.
        `order`: says who of the waiting is admitted next; without one, the oldest."""
        self._pages = pages
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        self._whole_prompts = whole_prompts
        self._max_scored_tokens = (
            max_step_tokens if max_scored_tokens is None else max_scored_tokens
        )
        self._scored_budget = 0
        self._pass_tokens = pass_tokens
        self._pass_sequences = max_sequences if pass_sequences is None else pass_sequences
        self._passing: Batch | None = None
        self._again: set[int] = set()
        """Sequences whose pass was broken off: the next one takes these alone."""
        self._hits = 0
        self.waiting: list[Sequence] = []
        """Oldest first."""
        self.running: list[Sequence] = []
        """Oldest first; each holds its blocks."""
        self._released: list[int] = []
        self._sizer = sizer
        self.order = order
        self._blocked = False
        """Whether a waiting sequence found no blocks when it was last looked at."""
        self.limit = BatchLimit(max_sequences, max_step_tokens, 0.0, "bounds")
        """What bounded the last plan."""

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind all older ones."""
        bisect.insort(self.waiting, sequence, key=lambda s: s.sequence_id)

    def remove(self, sequence: Sequence, keep_content: bool = True) -> list[int]:
        """Takes a sequence out, wherever it is, and frees its blocks.

        Returns the blocks that nobody holds any more and whose content was given up.
        """
        if self.order is not None:
            self.order.left(sequence.sequence_id)
        if sequence in self.running:
            self.running.remove(sequence)
            return self._let_go(sequence, keep_content)
        self.waiting.remove(sequence)
        return []

    def plan(self) -> Batch:
        """The next step; its plan has no parts when nothing can run.

        While a pass is under way, only decoding sequences are in it.
        """
        outgrown: list[Sequence] = []
        preempted = 0
        self._bound()
        self._scored_budget = self._max_scored_tokens
        decoding: list[Sequence] = []
        for sequence in self._decoding():
            if sequence not in self.running:
                continue  # preempted for an older one
            preempted += self._make_room(sequence, outgrown)
            if sequence in self.running:
                decoding.append(sequence)
        budget = min(self._max_step_tokens - len(decoding), self.limit.prefill_tokens)
        scheduled = [(s, 1) for s in sorted(decoding, key=lambda s: (s.computed, s.sequence_id))]
        if self._passing is None:
            # What was just sent away must not come back in the same step.
            self._schedule_prompts(
                self.running, budget, scheduled, self.limit.sequences, admit=not preempted
            )
        return self._batch(scheduled, outgrown, preempted)

    def plan_pass(self) -> Batch | None:
        """A layer-major pass of prompts that would not fit one step; None where there is no need.

        It is under way until `advance` or `break_off`; nothing in it is preempted.
        """
        if not self._pass_tokens or self._passing is not None:
            return None
        again = self._again.intersection(s.sequence_id for s in self.running)
        self._again.clear()
        pending = sum(s.pending for s in (*self.running, *self.waiting) if s.pending > 1)
        if pending <= self._max_step_tokens:
            return None
        self._bound()
        self._scored_budget = self._max_scored_tokens
        scheduled: list[tuple[Sequence, int]] = []
        members = [s for s in self.running if not again or s.sequence_id in again]
        self._schedule_prompts(
            members, self._pass_tokens, scheduled, self._pass_sequences, admit=not again
        )
        if sum(count for _, count in scheduled) <= self._max_step_tokens:
            return None  # prefix hits, or no room for more: a step does
        self._passing = self._batch(scheduled, layer_major=True)
        return self._passing

    def break_off(self, start_over: bool) -> None:
        """The pass under way will not be finished; its sequences come again in the next one.

        `start_over`: from their first token, as their state is no longer what it was.
        """
        if self._passing is None:
            return
        for sequence in self._passing.sequences:
            if start_over:
                sequence.computed = 0
            self._again.add(sequence.sequence_id)
        self._passing = None

    def is_passing(self, sequence: Sequence) -> bool:
        """Whether a sequence is in the pass under way."""
        return self._passing is not None and sequence in self._passing.sequences

    @property
    def has_work(self) -> bool:
        """Whether it has a sequence that is not held."""
        return any(not sequence.held for sequence in (*self.running, *self.waiting))

    @property
    def has_decoding(self) -> bool:
        """Whether a step beside the pass under way would do anything."""
        return bool(self._decoding())

    def advance(self, batch: Batch, failed: frozenset[int] = frozenset()) -> None:
        """Books what a step computed, and publishes the blocks that it completed.

        `failed` holds ids of sequences whose rows are not to be trusted.
        """
        if batch is self._passing:
            self._passing = None
        size = self._pages.block_tokens
        for part, sequence in zip(batch.plan.parts, batch.sequences, strict=True):
            if sequence.sequence_id in failed:
                continue
            before = sequence.computed // size
            sequence.computed += len(part.token_ids)
            sequence.scored = max(sequence.scored, part.scored[1])
            full = sequence.computed // size
            if sequence.shares_blocks and full > before:
                hashes = sequence.hashes(full, size)
                for number in range(before, full):
                    self._pages.publish(sequence.block_ids[number], hashes[number])

    def hold_s(self) -> float:
        """Seconds by which the next step may be put off; changes nothing."""
        if self._sizer is None or self._passing is not None or not self.has_work:
            return 0.0
        return self._sizer.decide(self.running, self.waiting, self._blocked).hold_s

    def _bound(self) -> None:
        """Has the next plan bounded."""
        if self._sizer is not None:
            self.limit = self._sizer.decide(self.running, self.waiting, self._blocked)
        self._blocked = False

    def _decoding(self) -> list[Sequence]:
        return [s for s in self.running if s.pending == 1 and not s.held and not self.is_passing(s)]

    def _batch(
        self,
        scheduled: list[tuple[Sequence, int]],
        outgrown: list[Sequence] | None = None,
        preempted: int = 0,
        layer_major: bool = False,
    ) -> Batch:
        released, self._released = tuple(self._released), []
        hits, self._hits = self._hits, 0
        parts = tuple(self._part(sequence, count) for sequence, count in scheduled)
        return Batch(
            plan=StepPlan(parts=parts, released=released, layer_major=layer_major),
            sequences=tuple(sequence for sequence, _ in scheduled),
            outgrown=tuple(outgrown or ()),
            preemptions=preempted,
            prefix_hit_tokens=hits,
        )

    def _schedule_prompts(
        self,
        members: list[Sequence],
        budget: int,
        scheduled: list[tuple[Sequence, int]],
        most: int,
        admit: bool,
    ) -> None:
        """Adds prompt parts of running `members`, then of those it may admit, one after another,
        until the budget or `most` sequences are reached."""
        for sequence in [s for s in members if s.pending > 1 and not s.held]:
            if len(scheduled) < most:
                budget -= self._schedule_prompt(sequence, budget, scheduled)
        while admit and budget > 0 and len(scheduled) < most:
            able = [s for s in self.waiting if not (s.waits_for_leader or s.held)]
            if not able or len(self.running) >= self.limit.sequences:
                break
            sequence = able[0 if self.order is None else self.order.pick(able, self.running)]
            self._blocked = not self._admit(sequence)
            if self._blocked:
                break
            if self.order is not None:
                self.order.admitted(sequence, able)
            self.waiting.remove(sequence)
            self._hits += sequence.computed
            budget -= self._schedule_prompt(sequence, budget, scheduled)

    def _schedule_prompt(
        self, sequence: Sequence, budget: int, scheduled: list[tuple[Sequence, int]]
    ) -> int:
        """Adds a part of the prompt within the budget; returns its tokens."""
        count = min(sequence.pending, budget)
        if sequence.to_score > self._scored_budget:
            known = max(0, sequence.scored - sequence.computed)
            count = min(count, known + self._scored_budget)
        if self._whole_prompts and count < sequence.pending:
            # One that can never fit the budget gets a step of its own beside the decoding ones.
            alone = all(other.pending == 1 for other, _ in scheduled)
            count = sequence.pending if budget > 0 and alone else 0
        if count > 0:
            scheduled.append((sequence, count))
            begin, end = self._scored_part(sequence, count)
            self._scored_budget -= end - begin
        return count

    def _admit(self, sequence: Sequence) -> bool:
        """Takes all blocks of a waiting sequence, reusing cached ones, if they are free."""
        size = self._pages.block_tokens
        total = self._pages.blocks_for(len(sequence.token_ids))
        # The last token is always computed: its logits are what the answer begins with.
        reusable = (len(sequence.token_ids) - 1) // size
        if sequence.to_score:
            # Keys and values alone score no token.
            reusable = min(reusable, sequence.scored // size)
        found = self._pages.find(sequence.hashes(reusable, size))
        # A newcomer must not take the block that a running sequence needs for its next token.
        spare = sum(
            self._pages.blocks_for(len(other.token_ids) + 1) > len(other.block_ids)
            for other in self.running
        )
        if not self._pages.can_allocate(total - len(found) + spare, found):
            return False
        self._pages.hold(found)
        sequence.block_ids = found + self._pages.allocate(total - len(found))
        sequence.computed = len(found) * size
        if sequence.generated == 0:
            sequence.cached_tokens = sequence.computed
        bisect.insort(self.running, sequence, key=lambda s: s.sequence_id)
        return True

    def _make_room(self, sequence: Sequence, outgrown: list[Sequence]) -> int:
        """Gets the block that the next token needs; returns how many sequences it cost."""
        need = self._pages.blocks_for(sequence.computed + 1)
        if need <= len(sequence.block_ids):
            return 0
        if need > self._pages.num_blocks:
            self._end(sequence, outgrown)
            return 0
        preempted = 0
        while not self._pages.can_allocate(1):
            youngest = next(s for s in reversed(self.running) if not self.is_passing(s))
            if youngest is sequence and len(self.running) == 1:
                self._end(sequence, outgrown)
                return preempted
            self.running.remove(youngest)
            self._let_go(youngest, keep_content=True)
            self.add(youngest)
            preempted += 1
            if youngest is sequence:
                return preempted
        sequence.block_ids += self._pages.allocate(1)
        return preempted

    def _end(self, sequence: Sequence, outgrown: list[Sequence]) -> None:
        self.remove(sequence)
        outgrown.append(sequence)

    def _let_go(self, sequence: Sequence, keep_content: bool) -> list[int]:
        freed = self._pages.release(sequence.block_ids, keep_content)
        sequence.block_ids = []
        self._released.append(sequence.sequence_id)
        return freed

    def _part(self, sequence: Sequence, count: int) -> SequencePart:
        start = sequence.computed
        end = start + count
        known = len(sequence.token_ids)
        return SequencePart(
            sequence_id=sequence.sequence_id,
            start=start,
            token_ids=tuple(sequence.token_ids[start:end]),
            block_ids=tuple(sequence.block_ids[: self._pages.blocks_for(end)]),
            # Tokens that are computed again after a preemption count as prefill.
            is_decode=count == 1 and start >= sequence.prompt_tokens and end == known,
            wants_logits=end == known,
            scored=self._scored_part(sequence, count),
            tenant=sequence.request.tenant,
            domain=sequence.request.domain,
            session=sequence.request.session,
        )

    @staticmethod
    def _scored_part(sequence: Sequence, count: int) -> tuple[int, int]:
        """The positions of a part whose logits score the prompt; (0, 0) for none."""
        begin = max(sequence.computed, sequence.scored)
        end = min(sequence.computed + count, sequence.scored + sequence.to_score)
        return (begin, end) if begin < end else (0, 0)
