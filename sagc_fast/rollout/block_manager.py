"""Ownership of the KV cache's blocks: who holds which, and which are free. Knows nothing of tokens or tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int32]


class BlockManager:
    """Reference counts over ``num_blocks`` blocks and a stack of the free ones; every call costs O(1) per block.

    A block shared by several owners (the prompt of a group) counts each of them and becomes free with the last. The
    most recently freed block is handed out first, so a pool larger than needed is never touched in full.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refcounts = np.zeros(num_blocks, dtype=np.int32)
        self.peak_used = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int, is_reserve: bool = False) -> BlockIds:
        """Take ``count`` free blocks, each with one owner. The caller has checked ``num_free``.

        A reserve for later steps counts in ``peak_used`` only as far as it is still held at :meth:`note_peak`.
        """
        if count > self.num_free:
            raise RuntimeError(
                f"{count} KV blocks were asked for with {self.num_free} free; the scheduler must reclaim."
            )
        taken = self._free[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self.refcounts[taken] = 1
        if not is_reserve:
            self.note_peak()
        return taken

    def note_peak(self, num_unreached: int = 0) -> None:
        """Count the blocks in use, less so many that are reserved for steps that come later."""
        self.peak_used = max(self.peak_used, self.num_used - num_unreached)

    def share(self, blocks: BlockIds) -> None:
        """One more owner for each of these blocks (distinct ids, as in a block table)."""
        self.refcounts[blocks] += 1

    def release(self, blocks: BlockIds) -> None:
        """One owner fewer for each of these blocks (distinct ids); blocks without an owner become free."""
        self.refcounts[blocks] -= 1
        counts = self.refcounts[blocks]
        if counts.size and counts.min() < 0:
            raise RuntimeError(
                f"KV blocks {blocks[counts < 0].tolist()} were released more often than they were taken."
            )
        freed = blocks[counts == 0]
        self._free[self.num_free : self.num_free + freed.size] = freed[::-1]
        self.num_free += freed.size
