"""What each engine step computes: decode rows, prefill chunks, and whose KV blocks give way. Torch-free.

Cost model. A step costs about ``a + b * tokens`` seconds: ``a`` reads the weights once, ``b`` is a token's arithmetic.
The number of tokens of a call is fixed, so a call is fast when it has few steps. Hence
- every decode row runs in every step, and prefill chunks fill the rest of ``max_batch_tokens`` in the same step, where
  they ride on weights that are read anyway; the bound caps the time and the memory of one step;
- completions start longest expected first: list scheduling by longest processing time (Graham 1969) ends within 4/3 of
  the best schedule, and the completion that would end last is not the one that starts last;
- a row is given out again in the step after its sequence ends.

Memory. Blocks for decode rows are secured before anything else in a step, so that nothing can fail later in it: idle
prompts (cached for siblings that wait, none running) go first, then the youngest sequences are sent back to wait,
oldest readmitted first; their tokens are kept and only their KV is computed again. New sequences are admitted only
while one free block per running row remains (ours: a row grows by ``block_size`` tokens before it needs another); where
that fails, idle prompts of other groups go as well, the one idle for longest first, if the sequence can start for it.

Bursts. A plan may ask for several steps at once (``num_steps``) where planning each of them would change nothing: only
decode rows, nothing to prefill or recompute, no drafts until then, no row whose end the host must find, free blocks.
Whoever waits for a row or for blocks could not start before a row ends, as free blocks only become fewer until then; so
the runner returns behind the first step in which one does. Where nobody waits it goes on with the rows that are left,
until so few are left that drafts may begin. Tokens and statistics are those of single steps.

A plan costs O(admitted rows), most of it in whole-array operations; completions that wait cost nothing.
"""

from __future__ import annotations

import heapq
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from sagc_fast.profiling import ranged
from sagc_fast.rollout.admission import AdmissionQueue
from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.rollout.plan import Chunk, StepPlan, by_group, make_chunk, sampled_by, samples_of_rows
from sagc_fast.rollout.rows import RowTable, Slots
from sagc_fast.rollout.sequence import PromptGroup, Sequence
from sagc_fast.rollout.speculation import Drafts, Speculator, no_drafts
from sagc_fast.rollout.tables import BlockTables


class Scheduler:
    """Owns queue, rows and blocks of one ``generate`` call.

    Call :meth:`schedule`, run the plan, :meth:`commit` it, record the sampled tokens in ``rows``, then :meth:`finish`
    the sequences that end. ``blocks`` must be able to hold the longest sequence alone (the engine checks it before).
    Without a ``speculator`` nothing is drafted. ``max_steps`` bounds the steps of a plan; ``closes_ranks``: its runner
    goes on without rows that are over, so that it may be asked for more steps than some row has left.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        rows: RowTable,
        blocks: BlockManager,
        block_size: int,
        max_batch_tokens: int,
        speculator: Speculator | None = None,
        max_steps: int = 1,
        closes_ranks: bool = False,
    ) -> None:
        if rows.capacity > max_batch_tokens:
            raise ValueError(f"{rows.capacity} rows do not fit in steps of max_batch_tokens={max_batch_tokens}.")
        self.queue = queue
        self.rows = rows
        self.blocks = blocks
        self.block_size = block_size
        self.tables = BlockTables(rows, blocks, block_size)
        self.max_batch_tokens = max_batch_tokens
        self.speculator = speculator
        self.max_steps = max_steps
        self.closes_ranks = closes_ranks
        self._num_new = np.zeros(rows.capacity, dtype=np.int64)
        """Tokens that each decode row of the last plan got into the cache."""
        self.num_preemptions = 0
        self._sent_back: list[tuple[int, Sequence]] = []
        self._prefilling: list[PromptGroup] = []
        self._recomputing: list[Sequence] = []
        self._idle: dict[int, PromptGroup] = {}
        self._num_idle_blocks = 0
        self._num_started = 0
        self._late_forks: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.rows.num_occupied or self._sent_back or self.queue.num_waiting)

    @property
    def _is_awaited(self) -> bool:
        """Whether somebody waits for a row or for blocks."""
        return bool(self._sent_back or self.queue.num_waiting)

    # ---- one step ------------------------------------------------------------------------------------------------

    @ranged("schedule")
    def schedule(self) -> StepPlan:
        """Secure the decode rows' blocks, admit what fits, fill the token budget with prefill chunks."""
        self._late_forks = []
        preemptions_before = self.num_preemptions
        self._secure_decode_blocks()
        if self.num_preemptions == preemptions_before:
            self._admit()
        decode_slots = self.rows.decode_slots
        budget = self.max_batch_tokens - decode_slots.size
        chunks = self._plan_chunks(budget)
        drafts = self._plan_drafts(budget - sum(chunk.length for chunk in chunks))
        sampled = [sampled_by(chunk) for chunk in chunks if chunk.is_last]
        joining = [s.slot for group in (*sampled, self._late_forks) for s in group]
        num_steps = 1
        is_settled = self.num_preemptions == preemptions_before and not (self._prefilling or self._recomputing)
        if is_settled and not joining and not drafts.tokens.size:
            num_steps = self._reserve_steps()
        copy_sources, copy_targets = self.tables.take_copies()
        sample_slots, sample_offsets = samples_of_rows(decode_slots, drafts, joining)
        return StepPlan(
            decode_slots=decode_slots,
            drafts=drafts,
            chunks=chunks,
            samples_per_chunk=tuple(len(sequences) for sequences in sampled),
            late_forks=by_group(self._late_forks),
            copy_sources=copy_sources,
            copy_targets=copy_targets,
            sample_slots=sample_slots,
            sample_offsets=sample_offsets,
            num_steps=num_steps,
            stop_at_rows=self._rows_to_stop_at(),
            is_awaited=self._is_awaited,
        )

    def commit(self, plan: StepPlan, num_new: NDArray[np.int64], num_steps: int = 1, num_ahead: int = 0) -> None:
        """``num_steps`` of the plan's steps are done. Each decode row has ``num_new`` [D] tokens more in the cache: one
        and its accepted drafts, or those of a burst's steps up to its end; rows that sample their next token become
        decode rows. The blocks of ``num_ahead`` steps more are kept in the tables: the runner is at them."""
        rows = self.rows
        rows.num_computed[plan.decode_slots] += num_new
        self._num_new[plan.decode_slots] = num_new
        if plan.drafts.tokens.size:
            self.tables.release_unused(plan.decode_slots[plan.drafts.lengths >= num_new])
        if plan.num_steps > 1:
            self._commit_burst(plan, num_new, num_steps, num_ahead)
        for chunk in plan.chunks:
            if chunk.sequence is None:
                self._commit_prompt_chunk(chunk)
            else:
                slot = chunk.sequence.slot
                rows.num_computed[slot] += chunk.length
                if chunk.is_last:
                    self._recomputing.remove(chunk.sequence)
        joining = plan.sample_slots[plan.num_decode_tokens :]
        if joining.size:
            rows.start_decoding(joining)

    def finish(self, slots: Slots, num_steps: NDArray[np.int64]) -> list[Sequence]:
        """These decode rows have ended: free their rows and blocks; returns their sequences, outputs filled in.
        ``num_steps`` [slots], not falling: with which step of the plan each ended, from 1."""
        finished = []
        for num_done, run in groupby(zip(num_steps.tolist(), slots.tolist(), strict=True), key=itemgetter(0)):
            self._note_peak(num_done)
            leaving = [slot for _, slot in run]
            self.rows.stop_decoding(np.array(leaving))
            finished += [self._finish(slot) for slot in leaving]
        self.blocks.note_peak()
        return finished

    def _finish(self, slot: int) -> Sequence:
        sequence = self.rows.sequences[slot]
        assert sequence is not None
        group = sequence.group
        self.blocks.release(self.rows.detach(slot))
        group.num_finished += 1
        group.finished_tokens += sequence.num_output
        if self.speculator is not None:
            self.speculator.note_finished(sequence.num_output, sequence.max_output)
        self._leave(group)
        self.queue.note_finished(group, sequence.num_output)
        return sequence

    # ---- drafts --------------------------------------------------------------------------------------------------

    def _plan_drafts(self, budget: int) -> Drafts:
        """What the speculator proposes within the token budget and the free blocks: a draft displaces nothing."""
        rows, slots = self.rows, self.rows.decode_slots
        if self.speculator is None or budget <= 0 or self.speculator.num_quiet_steps(slots.size) is None:
            return no_drafts(slots.size)
        most = rows.max_output[slots] - rows.num_output[slots] - 1  # the draw behind the last draft counts too
        drafts = self.speculator.propose(slots, most, budget, self._is_awaited)
        if not drafts.tokens.size:
            return drafts
        num_missing = self.tables.num_missing(slots, drafts.lengths + 1)
        if num_missing.sum() > self.blocks.num_free:
            return drafts.cut(rows.num_blocks[slots] * self.block_size - 1 - rows.num_computed[slots])
        self.tables.extend(slots, num_missing)
        return drafts

    # ---- bursts --------------------------------------------------------------------------------------------------

    def _reserve_steps(self) -> int:
        """How many steps the decode rows can take without a new plan; their blocks are in the tables then. A burst
        displaces nothing: it is as long as free blocks allow."""
        rows, slots = self.rows, self.rows.decode_slots
        num_steps, num_quiet = self.max_steps, self._num_quiet_steps()
        if num_quiet is not None:
            num_steps = min(num_steps, 1 + num_quiet)
        if num_steps == 1 or not slots.size or rows.needs_host[slots].any():
            return 1
        num_left = rows.max_output[slots] - rows.num_output[slots]
        # By their caps alone so many rows go on up to the end of the last step.
        num_going = 1 + (self._rows_to_stop_at() if self.closes_ranks else slots.size - 1)
        num_steps = min(num_steps, int(np.partition(num_left, slots.size - num_going)[slots.size - num_going]))
        while num_steps > 1:
            num_missing = self.tables.num_missing(slots, np.minimum(num_left, num_steps))
            if num_missing.sum() <= self.blocks.num_free:
                self.tables.extend(slots, num_missing, is_reserve=True)
                return num_steps
            num_steps //= 2
        return 1

    def _rows_to_stop_at(self) -> int:
        """With how many rows left the next plan could be another one: their places go to who waits, or drafts begin."""
        num_rows = self.rows.decode_slots.size
        if self._is_awaited:
            return max(0, num_rows - 1)
        if self.speculator is None or self._num_quiet_steps() is not None:
            return 0
        return max(0, min(num_rows, self.max_batch_tokens, self.speculator.most_rows + 1) - 1)

    def _num_quiet_steps(self) -> int | None:
        """For how many steps more the speculator would propose nothing; None: until fewer rows are left."""
        num_rows = self.rows.decode_slots.size
        if self.speculator is None or num_rows >= self.max_batch_tokens:
            return None
        return self.speculator.num_quiet_steps(num_rows)

    def _commit_burst(self, plan: StepPlan, num_new: NDArray[np.int64], num_steps: int, num_ahead: int) -> None:
        if num_steps + num_ahead < plan.num_steps:
            self.tables.release_unused(plan.decode_slots, num_ahead)
        if (num_new == num_steps).all():  # else :meth:`finish` does it, as rows go
            self.blocks.note_peak()
        if self.speculator is not None and self._num_quiet_steps() is not None:
            self.speculator.skip(num_steps - 1)

    def _note_peak(self, num_done: int) -> None:
        """Count the blocks that the decode rows, all still going, held behind ``num_done`` steps of the burst."""
        if self.blocks.num_used <= self.blocks.peak_used:
            return
        slots = self.rows.decode_slots
        num_later = self._num_new[slots] - num_done
        self.blocks.note_peak(num_unreached=self.tables.num_blocks_of_last(slots, num_later))

    # ---- memory --------------------------------------------------------------------------------------------------

    def _secure_decode_blocks(self) -> None:
        """Give every decode row a block of its own to write to, making room first where there is none."""
        while not self.tables.secure_next_token(self.rows.decode_slots):
            self._reclaim()

    def _reclaim(self) -> None:
        """Free at least one block, or bring the demand down: idle prompts, then the youngest row, then a spare copy."""
        if self._idle:
            self._evict_prompt(next(iter(self._idle.values())))
        elif self.rows.num_occupied > 1:
            self._send_back(self.rows.youngest())
        elif not self.tables.drop_partial_block(self.rows.youngest().group):
            raise RuntimeError("The KV cache cannot hold one sequence; the engine should have refused the call.")

    def _send_back(self, sequence: Sequence) -> None:
        """Preempt: keep the tokens, give up row and blocks, wait for readmission ahead of new sequences."""
        rows, group = self.rows, sequence.group
        slot = np.array([sequence.slot])
        rows.stop_decoding(slot)
        self.blocks.release(rows.detach(sequence.slot))
        if sequence in group.joiners:
            group.joiners.remove(sequence)
            if not group.joiners:
                self._prefilling.remove(group)
                group.is_prefilling = False
        elif sequence in self._recomputing:
            self._recomputing.remove(sequence)
        self.num_preemptions += 1
        heapq.heappush(self._sent_back, (sequence.order, sequence))
        self._leave(group)

    def _leave(self, group: PromptGroup) -> None:
        """One admitted sequence fewer: with the last, the prompt becomes idle, or goes when all have finished."""
        group.num_live -= 1
        if group.num_live:
            return
        if group.num_waiting:
            self._idle[group.prompt_index] = group
            self._num_idle_blocks += group.blocks.size
        else:
            self._evict_prompt(group)
            group.last_hidden = None

    def _not_idle(self, group: PromptGroup) -> None:
        if self._idle.pop(group.prompt_index, None) is not None:
            self._num_idle_blocks -= group.blocks.size

    def _evict_prompt(self, group: PromptGroup) -> None:
        self._not_idle(group)
        self.tables.drop_prompt(group)

    # ---- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.rows.num_free:
            sequence = self._sent_back[0][1] if self._sent_back else self.queue.peek()
            if sequence is None or not self._has_room(sequence):
                return
            if sequence.order < 0:
                self.queue.pop(sequence)
                sequence.order = self._num_started
                self._num_started += 1
            else:
                heapq.heappop(self._sent_back)
            self._place(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the sequence may start now, with idle prompts of other groups given up for it where that is enough;
        with nothing running, make it so."""
        num_running = self.rows.num_occupied
        wanted = self._blocks_to_start(sequence) + (num_running + 1 if num_running else 0)
        if wanted <= self.blocks.num_free:
            return True
        own = self._idle.get(sequence.group.prompt_index)
        num_idle = self._num_idle_blocks - (own.blocks.size if own else 0)
        if num_running and wanted > self.blocks.num_free + num_idle:
            return False
        while wanted > self.blocks.num_free and len(self._idle) > (own is not None):
            self._evict_prompt(next(group for group in self._idle.values() if group is not own))
        return True  # with nothing running, placing takes over the prompt's partial block instead of copying it

    def _blocks_to_start(self, sequence: Sequence) -> int:
        group = sequence.group
        if not group.is_cached:
            return 0 if group.is_prefilling else self.tables.blocks_of(group.prompt_length) - group.blocks.size
        if sequence.num_output == 0:
            return 0
        return self.tables.blocks_of(sequence.length) - group.prompt_length // self.block_size

    def _place(self, sequence: Sequence) -> None:
        """Give the sequence a row: behind its prompt's prefill, at a finished prompt, or with KV to compute again."""
        group = sequence.group
        self.rows.attach(sequence)
        group.num_live += 1
        self._not_idle(group)
        if not group.is_cached:
            group.joiners.append(sequence)
            if not group.is_prefilling:
                self._start_prefill(group)
        elif sequence.num_output == 0:
            self.tables.fork(sequence)
            self._late_forks.append(sequence)
            self._drop_partial_if_unneeded(group)
        else:
            self.tables.fork_and_extend(sequence)
            if self.rows.length[sequence.slot] - group.prompt_length == 1:
                self.rows.start_decoding(np.array([sequence.slot]))
            else:
                self._recomputing.append(sequence)
            self._drop_partial_if_unneeded(group)

    def _start_prefill(self, group: PromptGroup) -> None:
        self.tables.complete_prompt(group)
        group.is_prefilling = True
        self._prefilling.append(group)

    def _drop_partial_if_unneeded(self, group: PromptGroup) -> None:
        """With no sibling left to fork, the last writer may keep the partial block instead of copying it."""
        if not group.num_waiting:
            self.tables.drop_partial_block(group)

    # ---- prefill -------------------------------------------------------------------------------------------------

    def _plan_chunks(self, budget: int) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        for sequence in self._recomputing:
            if budget <= 0:
                break
            start, end = (int(array[sequence.slot]) for array in (self.rows.num_computed, self.rows.length))
            chunks.append(make_chunk(sequence.group, sequence, start, end, sequence.high_water, budget))
            budget -= chunks[-1].length
        for group in self._prefilling:
            if budget <= 0:
                break
            chunks.append(make_chunk(group, None, group.num_cached, group.prompt_length, group.high_water, budget))
            budget -= chunks[-1].length
        return tuple(chunks)

    def _commit_prompt_chunk(self, chunk: Chunk) -> None:
        group = chunk.group
        group.num_cached += chunk.length
        group.high_water = max(group.high_water, group.num_cached)
        if not chunk.is_last:
            return
        self._prefilling.remove(group)
        group.is_prefilling = False
        joiners, group.joiners = group.joiners, []
        for sequence in joiners:
            if sequence.num_output == 0:
                self.tables.fork(sequence)
            else:  # next in line, now at a cached prompt
                self.rows.detach(sequence.slot)
                heapq.heappush(self._sent_back, (sequence.order, sequence))
                self._leave(group)
        self._drop_partial_if_unneeded(group)
