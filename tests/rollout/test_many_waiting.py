"""Completions that wait cost a step nothing: work is counted, not timed."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sagc_fast.rollout.admission import AdmissionQueue
from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.rollout.lengths import LengthHistory
from sagc_fast.rollout.rows import RowTable
from sagc_fast.rollout.scheduler import Scheduler
from sagc_fast.rollout.sequence import PromptGroup, Sequence
from sagc_fast.types import SamplingParams

NUM_ROWS, GROUP_SIZE, MOST_TOKENS, BLOCK_SIZE = 32, 8, 12, 4


def scheduler_with(num_completions):
    rows = RowTable(NUM_ROWS, max_blocks=8)
    queue = AdmissionQueue(LengthHistory())
    for index in range(num_completions // GROUP_SIZE):
        group = PromptGroup(index, index, np.zeros(9, dtype=np.int64))
        params = SamplingParams(max_new_tokens=MOST_TOKENS)
        group.sequences += [Sequence(group, sample, params, MOST_TOKENS, end_set=0) for sample in range(GROUP_SIZE)]
        queue.add(group)
    return Scheduler(queue, rows, BlockManager(NUM_ROWS * 16), BLOCK_SIZE, max_batch_tokens=200)


def lines_per_step(num_completions, num_steps=40):
    """Lines of Python that ``num_steps`` steps run, with ends spread over the rows."""
    scheduler = scheduler_with(num_completions)
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace

    def step(index):
        rows, plan = scheduler.rows, scheduler.schedule()
        scheduler.commit(plan, np.ones(plan.decode_slots.size, dtype=np.int64))
        slots = plan.sample_slots
        if slots.size:
            zeros = np.zeros(slots.size, dtype=np.int64)
            rows.append(slots, plan.sample_offsets, zeros, zeros.astype(np.float32))
            ended = slots[(slots + index) % MOST_TOKENS == 0]
            scheduler.finish(ended, np.ones_like(ended))

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for index in range(num_steps):
            step(index)
    finally:
        sys.settrace(before)
    assert scheduler.queue.num_waiting > 0
    return count


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the tracer for itself")
def test_a_step_runs_no_more_lines_when_a_hundred_times_as_many_wait():
    few, many = lines_per_step(160), lines_per_step(16_000)
    assert many <= 1.1 * few


def test_heaps_hold_groups_not_completions():
    scheduler = scheduler_with(8_000)
    assert len(scheduler.queue._known) + len(scheduler.queue._unknown) == 8_000 // GROUP_SIZE
