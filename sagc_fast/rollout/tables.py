"""Which KV blocks each admitted row and each prompt holds: forks, copies on write, growth, what is given back.

How it is done, not when: the scheduler decides who gets blocks and who gives way. Torch-free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.rollout.rows import RowTable, Slots
from sagc_fast.rollout.sequence import NO_BLOCKS, PromptGroup, Sequence

NO_COPIES = np.empty((0, 2), dtype=np.int32)


class BlockTables:
    """The block tables of ``rows`` and the ``blocks`` of groups; blocks hold ``block_size`` tokens.

    The callers have checked ``blocks.num_free``. Copies that the step's runner has to make before it writes are
    collected for :meth:`take_copies`.
    """

    def __init__(self, rows: RowTable, blocks: BlockManager, block_size: int) -> None:
        self.rows = rows
        self.blocks = blocks
        self.block_size = block_size
        self._copies: list[tuple[int, int]] = []

    def take_copies(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Blocks to copy since the last call, and where to."""
        copies = np.array(self._copies, dtype=np.int32).reshape(-1, 2) if self._copies else NO_COPIES
        self._copies = []
        return copies[:, 0], copies[:, 1]

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- decode rows ---------------------------------------------------------------------------------------------

    def secure_next_token(self, slots: Slots) -> bool:
        """Give each of these rows a block of its own to write its next token to; False, and nothing done, where free
        blocks do not suffice."""
        rows, blocks = self.rows, self.blocks
        if not slots.size:
            return True
        written = rows.num_computed[slots] // self.block_size
        grows = written >= rows.num_blocks[slots]
        targets = rows.block_tables[slots, np.where(grows, 0, written)]
        is_shared = ~grows & (blocks.refcounts[targets] > 1)
        num_needed = int(grows.sum())
        if is_shared.any():
            num_needed += self._count_copies(targets[is_shared])
        if num_needed > blocks.num_free:
            return False
        if is_shared.any():
            for slot, column in zip(slots[is_shared].tolist(), written[is_shared].tolist(), strict=True):
                self._copy_on_write(slot, column)
        growing = slots[grows]
        if growing.size:
            rows.block_tables[growing, rows.num_blocks[growing]] = blocks.allocate(growing.size)
            rows.num_blocks[growing] += 1
        return True

    def num_missing(self, slots: Slots, num_tokens: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Blocks that each slot lacks to hold so many tokens beyond those computed. [slots]"""
        room = self.rows.num_blocks[slots] * self.block_size - self.rows.num_computed[slots]
        return -(np.minimum(room - num_tokens, 0) // self.block_size)

    def extend(self, slots: Slots, num_missing: NDArray[np.int64], is_reserve: bool = False) -> None:
        """Give each slot so many more blocks."""
        rows, is_short = self.rows, num_missing > 0
        for slot, count in zip(slots[is_short].tolist(), num_missing[is_short].tolist(), strict=True):
            begin = rows.num_blocks[slot]
            rows.block_tables[slot, begin : begin + count] = self.blocks.allocate(count, is_reserve)
            rows.num_blocks[slot] += count

    def release_unused(self, slots: Slots, num_ahead: int = 0) -> None:
        """Give back blocks that hold nothing that counts: of rejected drafts, of steps that were not done. Room for
        ``num_ahead`` tokens more is kept."""
        rows = self.rows
        num_used = -(-(rows.num_computed[slots] + num_ahead) // self.block_size)
        is_over = rows.num_blocks[slots] > num_used
        for slot, kept in zip(slots[is_over].tolist(), num_used[is_over].tolist(), strict=True):
            self.blocks.release(rows.block_tables[slot, kept : rows.num_blocks[slot]])
            rows.num_blocks[slot] = kept

    def num_blocks_of_last(self, slots: Slots, num_tokens: NDArray[np.int64]) -> int:
        """Blocks that these rows hold for their last ``num_tokens`` [slots] computed tokens alone, or for none."""
        num_used = -(-(self.rows.num_computed[slots] - num_tokens) // self.block_size)
        return int(np.maximum(self.rows.num_blocks[slots] - num_used, 0).sum())

    def _count_copies(self, shared_blocks: NDArray[np.int32]) -> int:
        """Copies that these writers need; where they are a block's only owners, the last one keeps the original."""
        distinct, num_writers = np.unique(shared_blocks, return_counts=True)
        return int((num_writers - (self.blocks.refcounts[distinct] == num_writers)).sum())

    def _copy_on_write(self, slot: int, column: int) -> None:
        source = self.rows.block_tables[slot, column]
        if self.blocks.refcounts[source] == 1:
            return  # the other owners have taken their copies
        target = self.blocks.allocate(1)
        self.blocks.release(np.array([source], dtype=np.int32))
        self.rows.block_tables[slot, column] = target[0]
        self._copies.append((int(source), int(target[0])))

    # ---- prompts and their forks ---------------------------------------------------------------------------------

    def complete_prompt(self, group: PromptGroup) -> None:
        """Take the blocks that the prompt lacks."""
        missing = self.blocks_of(group.prompt_length) - group.blocks.size
        group.blocks = np.concatenate((group.blocks, self.blocks.allocate(missing)))

    def fork(self, sequence: Sequence) -> None:
        """Hold the prompt's blocks by reference; the first write will copy the partial one."""
        group = sequence.group
        self.blocks.share(group.blocks)
        num_full = group.prompt_length // self.block_size
        self.rows.set_blocks(sequence.slot, group.blocks, group.prompt_length, shared_blocks=num_full)

    def fork_and_extend(self, sequence: Sequence) -> None:
        """Readmission at a cached prompt: share its full blocks, copy the partial one, take blocks for the output."""
        group, rows = sequence.group, self.rows
        num_full = group.prompt_length // self.block_size
        num_private = self.blocks_of(int(rows.length[sequence.slot])) - num_full
        partial = group.blocks[num_full:]
        self.blocks.share(group.blocks[:num_full])
        if partial.size and self.blocks.num_free < num_private:
            private = np.concatenate((partial, self.blocks.allocate(num_private - 1)))
            group.blocks = group.blocks[:num_full]
            group.num_cached = num_full * self.block_size
        else:
            private = self.blocks.allocate(num_private)
            if partial.size:
                self._copies.append((int(partial[0]), int(private[0])))
        table = np.concatenate((group.blocks[:num_full], private))
        rows.set_blocks(sequence.slot, table, group.prompt_length, shared_blocks=num_full)

    def drop_partial_block(self, group: PromptGroup) -> bool:
        """Give up the group's hold on the partial block at the prompt's end; False when it holds none."""
        num_full = group.prompt_length // self.block_size
        if group.is_prefilling or group.blocks.size <= num_full:
            return False
        self.blocks.release(group.blocks[num_full:])
        group.blocks = group.blocks[:num_full]
        group.num_cached = num_full * self.block_size
        return True

    def drop_prompt(self, group: PromptGroup) -> None:
        """Give up the group's hold on all of its prompt."""
        self.blocks.release(group.blocks)
        group.blocks = NO_BLOCKS
        group.num_cached = 0
