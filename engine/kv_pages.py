"""KV blocks: who holds which, and which can be reused by an equal prompt beginning. No torch."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq


class KvPages:
    """Counts references to KV blocks and finds cached blocks by a chain of hashes.

    A block is either held by at least one sequence or free; a free block may still carry cached
    content, which the least recently freed gives up first. used + free = all, always.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with reusable content, least recently freed first."""
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - self.free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` positions take."""
        return -(-tokens // self.block_tokens)

    def find(self, hashes: Seq[bytes]) -> list[int]:
        """The blocks that carry the longest known beginning of a hash chain."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(self, num_blocks: int, reused: Seq[int] = ()) -> bool:
        """Whether `num_blocks` new blocks are free once `reused` ones are held."""
        woken = sum(1 for block in reused if self._references[block] == 0)
        return num_blocks <= self.free - woken

    def hold(self, blocks: Seq[int]) -> None:
        """One more sequence uses these blocks (found by `find`)."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """New blocks, held once each. Raises ValueError where `can_allocate` says no."""
        if not self.can_allocate(num_blocks):
            raise ValueError(f"expected {num_blocks} free KV blocks, found {self.free}")
        blocks = []
        for _ in range(num_blocks):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Seq[int], keep_content: bool = True) -> list[int]:
        """A sequence lets its blocks go. Their content stays reusable unless told otherwise.

        The last block goes first, so that a chain is given up from its end. Returns the blocks
        that are free now and carry nothing.
        """
        blank = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if not keep_content:
                self._forget(block)
            if self._hash_of[block] is None:
                self._blank.append(block)
                blank.append(block)
            else:
                self._cached[block] = None
        return blank

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a held, completely computed block findable. The first of equal blocks wins."""
        if self._hash_of[block] is None and digest not in self._block_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            self._hash_of[block] = None
            del self._block_of[digest]

    def check_invariants(self) -> None:
        """Raises RuntimeError where a block is lost, doubly free, or findable by a wrong hash."""
        free = set(self._blank) | set(self._cached)
        if len(free) != self.free:
            raise RuntimeError("a KV block is free twice")
        for block in range(self.num_blocks):
            if (self._references[block] == 0) != (block in free):
                raise RuntimeError(f"KV block {block}: {self._references[block]} references")
            digest = self._hash_of[block]
            if digest is not None and self._block_of.get(digest) != block:
                raise RuntimeError(f"KV block {block} is published under a lost hash")
        if len(self._block_of) != sum(digest is not None for digest in self._hash_of):
            raise RuntimeError("a published hash names a block without content")


def chain_start(salt: str) -> bytes:
    """The digest that a hash chain of `salt` (a tenant) starts from.

    A cryptographic hash: no tenant can craft a prompt that meets another's blocks.
    """
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def chain_next(previous: bytes, token_ids: Seq[int]) -> bytes:
    """The digest of one more full block after `previous`."""
    return hashlib.blake2b(previous + array("q", token_ids).tobytes(), digest_size=16).digest()
