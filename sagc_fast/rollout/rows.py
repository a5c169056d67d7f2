"""The admitted completions as arrays: one slot each, so that a step costs a few gathers whatever the number of rows.

A sequence keeps its slot while it is admitted. ``decode_slots`` lists the slots that take part in the next decode step,
contiguous and with siblings side by side; when a sequence ends, that list is all that moves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sagc_fast.rollout.noise import NoiseAhead
from sagc_fast.rollout.sequence import Sequence

Slots = NDArray[np.int64]


class RowTable:
    """Struct of arrays over ``capacity`` slots; block tables have ``max_blocks`` columns."""

    def __init__(self, capacity: int, max_blocks: int) -> None:
        self.capacity = capacity
        self.sequences: list[Sequence | None] = [None] * capacity
        self.decode_slots: Slots = np.empty(0, dtype=np.int64)
        self._free_slots = list(range(capacity - 1, -1, -1))

        self.is_occupied = np.zeros(capacity, dtype=bool)
        self.order = np.zeros(capacity, dtype=np.int64)
        self.group_index = np.zeros(capacity, dtype=np.int32)
        self.shared_blocks = np.zeros(capacity, dtype=np.int32)
        self.block_tables = np.zeros((capacity, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(capacity, dtype=np.int64)
        self.num_computed = np.zeros(capacity, dtype=np.int64)
        self.length = np.zeros(capacity, dtype=np.int64)
        self.num_output = np.zeros(capacity, dtype=np.int64)
        self.max_output = np.zeros(capacity, dtype=np.int64)
        self.last_token = np.zeros(capacity, dtype=np.int64)
        self.end_set = np.zeros(capacity, dtype=np.int64)
        self.has_matcher = np.zeros(capacity, dtype=bool)
        self.needs_host = np.zeros(capacity, dtype=bool)
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.prompt_id = np.zeros(capacity, dtype=np.uint64)
        self.sample_index = np.zeros(capacity, dtype=np.uint64)
        self.temperature = np.zeros(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.top_p = np.zeros(capacity, dtype=np.float32)
        self.min_p = np.zeros(capacity, dtype=np.float32)
        self.is_filtered = np.zeros(capacity, dtype=bool)
        self._noise = NoiseAhead(capacity)
        self._tokens = np.zeros((capacity, 16), dtype=np.int64)
        self._logprobs = np.zeros((capacity, 16), dtype=np.float32)

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    @property
    def num_occupied(self) -> int:
        return self.capacity - len(self._free_slots)

    def attach(self, sequence: Sequence) -> int:
        """Give the sequence a slot, without blocks yet, and return it."""
        slot = self._free_slots.pop()
        params, group, num_output = sequence.params, sequence.group, sequence.num_output
        self.sequences[slot] = sequence
        sequence.slot = slot
        self._noise.forget(slot)
        self.is_occupied[slot] = True
        self.order[slot] = sequence.order
        self.group_index[slot] = group.prompt_index
        self.num_blocks[slot] = 0
        self.num_computed[slot] = 0
        self.length[slot] = sequence.length
        self.num_output[slot] = num_output
        self.max_output[slot] = sequence.max_output
        self.end_set[slot] = sequence.end_set
        self.has_matcher[slot] = sequence.matcher is not None
        self.seed[slot] = params.seed
        self.prompt_id[slot] = group.prompt_id
        self.sample_index[slot] = sequence.sample_index
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.is_filtered[slot] = params.is_filtered and params.temperature > 0
        self.needs_host[slot] = self.has_matcher[slot] or self.is_filtered[slot]  # step by step: no bursts
        self._reserve_outputs(num_output)
        if num_output:
            self.last_token[slot] = sequence.token_ids[-1]
            self._tokens[slot, :num_output] = sequence.token_ids
            self._logprobs[slot, :num_output] = sequence.logprobs
        return slot

    def detach(self, slot: int) -> NDArray[np.int32]:
        """Take the sequence out, its tokens with it; returns the blocks it held, for the caller to release."""
        sequence = self.sequences[slot]
        assert sequence is not None
        sequence.token_ids, sequence.logprobs = self.outputs(slot)
        sequence.high_water = max(sequence.high_water, int(self.num_computed[slot]))
        sequence.slot = -1
        self.sequences[slot] = None
        self.is_occupied[slot] = False
        self._free_slots.append(slot)
        return self.block_tables[slot, : self.num_blocks[slot]].copy()

    def outputs(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Copies of the tokens and log-probs sampled so far."""
        count = self.num_output[slot]
        return self._tokens[slot, :count].copy(), self._logprobs[slot, :count].copy()

    def outputs_from(self, slot: int, start: int) -> list[int]:
        """Tokens sampled so far, without the first ``start``."""
        return self._tokens[slot, start : self.num_output[slot]].tolist()

    def set_blocks(self, slot: int, blocks: NDArray[np.int32], num_computed: int, shared_blocks: int) -> None:
        """The block table of a slot; its first ``num_computed`` tokens are in the cache."""
        self.block_tables[slot, : blocks.size] = blocks
        self.num_blocks[slot] = blocks.size
        self.num_computed[slot] = num_computed
        self.shared_blocks[slot] = shared_blocks

    def append(
        self, slots: Slots, offsets: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> None:
        """Record sampled tokens: for each entry the slot, how many tokens of this step precede it in that slot (the
        entries of a slot side by side, offsets rising from 0), and what was drawn."""
        columns = self.num_output[slots] + offsets
        self._reserve_outputs(int(columns.max()))
        self._tokens[slots, columns] = tokens
        self._logprobs[slots, columns] = logprobs
        self.last_token[slots] = tokens  # of equal slots the last entry stands, here and below
        num_added = columns + 1 - self.num_output[slots]
        self.length[slots] += num_added
        self.num_output[slots] = columns + 1

    def uniforms(self, slots: Slots, offsets: NDArray[np.int64]) -> NDArray[np.float64]:
        """The keyed noise of tokens that these slots are about to draw, ``offsets`` places behind the next one.
        float64 [R] in [0, 1)."""
        return self._noise.draw(slots, offsets, self.seed, self.prompt_id, self.sample_index, self.num_output)

    def noise_keys(self, slots: Slots, offsets: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The keys of :meth:`uniforms`: seed, prompt id, sample index, position; their bits in int64 [R]."""
        keys = [array[slots].view(np.int64) for array in (self.seed, self.prompt_id, self.sample_index)]
        return [*keys, self.num_output[slots] + offsets]

    def start_decoding(self, slots: Slots) -> None:
        """Let these slots join the decode rows, siblings side by side."""
        joined = np.concatenate((self.decode_slots, slots))
        self.decode_slots = joined[np.lexsort((self.sample_index[joined], self.group_index[joined]))]

    def stop_decoding(self, slots: Slots) -> None:
        """Take these slots out; the others close ranks and keep their order."""
        is_leaving = np.zeros(self.capacity, dtype=bool)
        is_leaving[slots] = True
        self.decode_slots = self.decode_slots[~is_leaving[self.decode_slots]]

    def youngest(self) -> Sequence:
        """The admitted sequence that was first admitted last."""
        slot = int(np.argmax(np.where(self.is_occupied, self.order, -1)))
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def _reserve_outputs(self, column: int) -> None:
        """Make room for a token in ``column``; doubling keeps the cost per token constant."""
        width = self._tokens.shape[1]
        if column < width:
            return
        extra = max(width, column + 1 - width)
        self._tokens = np.pad(self._tokens, ((0, 0), (0, extra)))
        self._logprobs = np.pad(self._logprobs, ((0, 0), (0, extra)))
