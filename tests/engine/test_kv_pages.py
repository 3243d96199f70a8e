"""KV blocks against a simple model: reference counts by sequence, contents by hash."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_pages import KvPages, chain_next, chain_start

NUM_BLOCKS = 6


def chain(*blocks: int, salt: str = "") -> list[bytes]:
    digests = []
    previous = chain_start(salt)
    for block in blocks:
        previous = chain_next(previous, [block] * 4)
        digests.append(previous)
    return digests


class PagesMachine(RuleBasedStateMachine):
    """The model: which sequence holds which blocks, and what was last published where."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = KvPages(NUM_BLOCKS, 4)
        self.held: dict[int, list[int]] = {}
        self.content: dict[int, bytes] = {}
        self.number = 0

    def _owned(self) -> set[int]:
        return {block for blocks in self.held.values() for block in blocks}

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=NUM_BLOCKS))
    def admit(self, prompt: list[int]) -> None:
        hashes = chain(*prompt)
        found = self.pages.find(hashes)
        for block, digest in zip(found, hashes, strict=False):
            assert self.content[block] == digest
        need = len(prompt) - len(found)
        free = NUM_BLOCKS - len(self._owned() | set(found))
        assert self.pages.can_allocate(need, found) == (need <= free)
        if need > free:
            return
        self.pages.hold(found)
        fresh = self.pages.allocate(need)
        assert not set(fresh) & (self._owned() | set(found))
        for block in fresh:
            self.content.pop(block, None)
        self.held[self.number] = found + fresh
        for block, digest in zip(self.held[self.number], hashes, strict=True):
            self.pages.publish(block, digest)
            if self.pages.find([digest]) == [block]:
                self.content[block] = digest
        self.number += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        blocks = self.held.pop(number)
        blank = self.pages.release(blocks, keep_content=keep)
        alone = set(blocks) - self._owned()
        if keep:
            assert set(blank) == {b for b in alone if b not in self.content}
        else:
            assert set(blank) == alone
            for block in alone:
                self.content.pop(block, None)

    @invariant()
    def books_balance(self) -> None:
        self.pages.check_invariants()
        assert self.pages.used == len(self._owned())
        assert self.pages.used + self.pages.free == NUM_BLOCKS


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_tenants_never_find_each_others_blocks() -> None:
    pages = KvPages(2, 4)
    block = pages.allocate(1)[0]
    pages.publish(block, chain(7, salt="one")[0])
    assert pages.find(chain(7, salt="one")) == [block]
    assert pages.find(chain(7, salt="two")) == []


def test_a_block_is_found_only_behind_its_own_beginning() -> None:
    pages = KvPages(4, 4)
    blocks = pages.allocate(2)
    for block, digest in zip(blocks, chain(1, 2), strict=True):
        pages.publish(block, digest)
    assert pages.find(chain(1, 2, 3)) == blocks
    assert pages.find(chain(3, 2)) == []


def test_the_end_of_the_least_recently_freed_chain_is_given_up_first() -> None:
    pages = KvPages(4, 4)
    old, new = pages.allocate(2), pages.allocate(2)
    for blocks, digests in ((old, chain(1, 2)), (new, chain(3, 4))):
        for block, digest in zip(blocks, digests, strict=True):
            pages.publish(block, digest)
    pages.release(old)
    pages.release(new)
    assert pages.allocate(1) == [old[1]]
    assert pages.find(chain(1, 2)) == [old[0]]
    assert pages.find(chain(3, 4)) == new


def test_more_blocks_than_are_free_are_refused() -> None:
    pages = KvPages(2, 4)
    pages.allocate(1)
    with pytest.raises(ValueError, match="2 free KV blocks, found 1"):
        pages.allocate(2)


def test_a_lost_block_is_noticed() -> None:
    pages = KvPages(2, 4)
    pages.allocate(1)
    pages._references[0] = pages._references[1] = 1
    with pytest.raises(RuntimeError, match="references"):
        pages.check_invariants()
