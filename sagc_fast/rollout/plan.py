"""What one engine step computes, as the scheduler hands it to the runner. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from sagc_fast.rollout.rows import Slots
from sagc_fast.rollout.sequence import PromptGroup, Sequence
from sagc_fast.rollout.speculation import Drafts


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens computed in one step: of a group's prompt, or of a sequence whose KV was given up."""

    group: PromptGroup
    sequence: Sequence | None
    """None: the prompt itself."""
    start: int
    length: int
    num_recomputed: int
    """Tokens of the chunk that had been computed before."""
    is_last: bool
    """Whether the chunk ends at the sequence's last token, so that its hidden state is wanted."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step. Samples are drawn in the order decode rows, finishing chunks, late forks."""

    decode_slots: Slots
    """One query token each, and the drafts behind it."""
    drafts: Drafts
    """Of each decode row, tokens that may come next, computed and drawn ahead of time."""
    chunks: tuple[Chunk, ...]
    samples_per_chunk: tuple[int, ...]
    """For each finishing chunk, how many sequences draw a token from it."""
    late_forks: tuple[tuple[PromptGroup, int], ...]
    """Prompts that an earlier step finished, and how many first tokens are drawn from each now."""
    copy_sources: NDArray[np.int32]
    """Blocks to copy before the step's tokens are written (copy on write of partial prompt blocks)."""
    copy_targets: NDArray[np.int32]
    sample_slots: Slots
    """The row of each token drawn, in sampling order: a decode row comes once and once more for each of its drafts."""
    sample_offsets: NDArray[np.int64]
    """How many places behind its row's next token each one stands: 0, or the number of drafts before it."""
    num_steps: int = 1
    """How often the runner may run the decode rows, each step feeding on the tokens of the one before. Above 1: there
    is nothing but decode rows, without drafts, filters and stop strings; the blocks of all these steps, up to each
    row's length cap, are in the block tables."""
    stop_at_rows: int = 0
    """The runner has to return behind the first step after which no more than so many rows go on: with one fewer than
    there are, behind the first in which one is over. It goes on without the others, or drops what they draw."""
    is_awaited: bool = False
    """Whether somebody waits for a row or for blocks, so that the plan behind a row's end is another one."""

    @property
    def is_decode_only(self) -> bool:
        """Whether there is nothing but one query token for each of some decode rows (several steps may feed on it)."""
        return self.decode_slots.size == self.sample_slots.size > 0 and not (self.chunks or self.drafts.tokens.size)

    @property
    def num_decode_tokens(self) -> int:
        """Tokens computed for decode rows, drafts included; as many samples come first."""
        return self.decode_slots.size + self.drafts.tokens.size

    @property
    def num_sampled_rows(self) -> int:
        """Rows that get at least one token in a step."""
        return self.sample_slots.size - self.drafts.tokens.size

    def samples_of(self, num_steps: int) -> tuple[Slots, NDArray[np.int64]]:
        """``sample_slots`` and ``sample_offsets`` of the tokens that ``num_steps`` steps bring, in the order in which
        the runner returns them: those of a row side by side."""
        if num_steps == 1:
            return self.sample_slots, self.sample_offsets
        slots = self.decode_slots.repeat(num_steps)
        return slots, np.arange(slots.size) % num_steps


def make_chunk(
    group: PromptGroup, sequence: Sequence | None, start: int, end: int, high_water: int, budget: int
) -> Chunk:
    """As many tokens of [start, end) as the budget holds; those below ``high_water`` had been computed before."""
    stop = min(end, start + budget)
    return Chunk(
        group, sequence, start, stop - start, num_recomputed=max(0, min(stop, high_water) - start), is_last=stop == end
    )


def by_group(sequences: list[Sequence]) -> tuple[tuple[PromptGroup, int], ...]:
    """Groups of sequences that stand side by side, and how many those are."""
    return tuple((group, len(list(run))) for group, run in groupby(s.group for s in sequences)) if sequences else ()


def samples_of_rows(decode_slots: Slots, drafts: Drafts, joining: list[int]) -> tuple[Slots, NDArray[np.int64]]:
    """``sample_slots`` and ``sample_offsets`` of a plan."""
    joined = np.array(joining, dtype=np.int64)
    if not drafts.tokens.size:
        slots = np.concatenate((decode_slots, joined)) if joining else decode_slots
        return slots, np.zeros(slots.size, dtype=np.int64)
    counts = drafts.lengths + 1
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = np.concatenate((np.repeat(decode_slots, counts), joined))
    return slots, np.concatenate((offsets, np.zeros_like(joined)))


def sampled_by(chunk: Chunk) -> list[Sequence]:
    """Sequences whose next token is drawn from this finishing chunk's hidden state."""
    if chunk.sequence is not None:
        return [chunk.sequence]
    return [sequence for sequence in chunk.group.joiners if sequence.num_output == 0]
