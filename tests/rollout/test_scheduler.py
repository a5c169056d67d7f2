"""The scheduler alone, without a model: invariants of every step, order of admission, cost per step."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sagc_fast.rollout.admission import AdmissionQueue
from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.rollout.lengths import LengthHistory
from sagc_fast.rollout.rows import RowTable
from sagc_fast.rollout.scheduler import Scheduler
from sagc_fast.rollout.sequence import PromptGroup, Sequence
from sagc_fast.types import SamplingParams


class Simulation:
    """Drives a scheduler with forced lengths: ``lengths[g][i]`` tokens for completion i of group g."""

    def __init__(self, prompts, lengths, *, blocks, block_size=4, rows=8, budget=64, history=None, caps=None):
        self.lengths = lengths
        self.block_size = block_size
        self.budget = budget
        queue = AdmissionQueue(history or LengthHistory())
        self.rows = RowTable(rows, max_blocks=64)
        self.blocks = BlockManager(blocks)
        self.scheduler = Scheduler(queue, self.rows, self.blocks, block_size, budget)
        self.groups = []
        for index, (prompt_length, group_lengths) in enumerate(zip(prompts, lengths, strict=True)):
            group = PromptGroup(index, index, np.full(prompt_length, index))
            cap = caps[index] if caps else max(group_lengths)
            params = SamplingParams(max_new_tokens=cap)
            group.sequences = [Sequence(group, i, params, cap, 0) for i in range(len(group_lengths))]
            queue.add(group)
            self.groups.append(group)
        self.started, self.active_rows, self.num_tokens = [], [], 0

    def step(self, check=True):
        plan = self.scheduler.schedule()
        if check:
            self.check(plan)
        self.num_tokens += plan.decode_slots.size + sum(chunk.length for chunk in plan.chunks)
        self.active_rows.append(plan.sample_slots.size)
        self.scheduler.commit(plan, np.ones(plan.decode_slots.size, np.int64))
        slots = plan.sample_slots
        if slots.size:
            zeros = np.zeros(slots.size, np.int64)
            self.rows.append(slots, zeros, zeros, np.zeros(slots.size, np.float32))
            for slot in slots[self.rows.num_output[slots] == 1].tolist():
                self.started.append(
                    (self.rows.sequences[slot].group.prompt_index, self.rows.sequences[slot].sample_index)
                )
            ended = [s for s in slots.tolist() if self.rows.num_output[s] == self.target(self.rows.sequences[s])]
            self.scheduler.finish(np.array(ended, dtype=np.int64), np.ones(len(ended), np.int64))
        return plan

    def target(self, sequence):
        return self.lengths[sequence.group.prompt_index][sequence.sample_index]

    def run(self):
        while self.scheduler.has_work:
            self.step()
        assert self.blocks.num_free == self.blocks.num_blocks
        return self

    def check(self, plan):
        assert plan.decode_slots.size + sum(chunk.length for chunk in plan.chunks) <= self.budget
        assert plan.sample_slots.size <= self.rows.capacity
        assert np.unique(plan.sample_slots).size == plan.sample_slots.size
        held = Counter(block for group in self.groups for block in group.blocks.tolist())
        for slot in np.flatnonzero(self.rows.is_occupied):
            held.update(self.rows.block_tables[slot, : self.rows.num_blocks[slot]].tolist())
        assert {b: int(c) for b, c in enumerate(self.blocks.refcounts) if c} == dict(held)
        for slot in plan.decode_slots.tolist():
            column = self.rows.num_computed[slot] // self.block_size
            assert self.blocks.refcounts[self.rows.block_tables[slot, column]] == 1, "a shared block would be written"
            assert self.rows.num_computed[slot] == self.rows.length[slot] - 1
        assert np.unique(plan.copy_targets).size == plan.copy_targets.size
        assert self.scheduler._num_idle_blocks == sum(g.blocks.size for g in self.scheduler._idle.values())


@st.composite
def simulations(draw):
    prompts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    lengths = [draw(st.lists(st.integers(1, 25), min_size=1, max_size=6)) for _ in prompts]
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    needed = max(-(-(p + n - 1) // block_size) for p, group in zip(prompts, lengths, strict=True) for n in group)
    rows = draw(st.integers(1, 9))
    return Simulation(
        prompts,
        lengths,
        blocks=needed + draw(st.integers(0, 40)),
        block_size=block_size,
        rows=rows,
        budget=rows + draw(st.integers(0, 30)),
    )


@given(simulation=simulations())
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_every_step_keeps_the_invariants_and_everything_finishes(simulation):
    simulation.run()
    for group, lengths in zip(simulation.groups, simulation.lengths, strict=True):
        assert [s.num_output for s in group.sequences] == lengths
    assert sum(simulation.active_rows) == sum(map(sum, simulation.lengths))


def test_prompt_is_prefilled_once_and_only_its_partial_block_is_copied():
    simulation = Simulation([10], [[3, 3, 3, 3]], blocks=40, block_size=4)
    first = simulation.step()
    assert [(c.start, c.length, c.is_last) for c in first.chunks] == [(0, 10, True)]
    assert first.sample_slots.size == 4
    assert simulation.blocks.num_used == 3
    second = simulation.step()
    assert second.copy_sources.tolist() == [second.copy_sources[0]] * 3  # the fourth writer keeps the original
    assert simulation.blocks.num_used == 2 + 4
    simulation.run()
    assert simulation.num_tokens == 10 + 4 * 2


def test_prefill_chunks_fill_what_decode_rows_leave_of_the_budget():
    simulation = Simulation([4, 30], [[9, 9], [2, 2]], blocks=100, rows=4, budget=10, caps=[9, 2])
    shapes = []
    while simulation.scheduler.has_work:
        plan = simulation.step()
        shapes.append((plan.decode_slots.size, [chunk.length for chunk in plan.chunks]))
    assert shapes[:5] == [(0, [4, 6]), (2, [8]), (2, [8]), (2, [8]), (4, [])]


def test_a_row_is_given_out_in_the_step_after_its_sequence_ends():
    simulation = Simulation([4], [[1, 5, 5, 2]], blocks=100, rows=2)
    assert simulation.run().active_rows[:4] == [2, 2, 2, 2]
    assert sum(simulation.active_rows) == 13


def test_longest_expected_starts_first():
    history = LengthHistory()
    for prompt, length in enumerate((10, 30, 20)):
        history.record(np.full(4, prompt), [length])
    simulation = Simulation([4, 4, 4], [[5], [5], [5]], blocks=100, rows=1, history=history, caps=[50, 50, 50]).run()
    assert [group for group, _ in simulation.started] == [1, 2, 0]


def test_finished_siblings_tell_how_long_the_others_will_be():
    """Groups 0 and 1 look alike until the first completion of each has ended; then the longer one goes first."""
    simulation = Simulation([4, 4], [[2, 2, 2], [9, 9, 9]], blocks=100, rows=2, caps=[20, 20])
    started = simulation.run().started
    assert started[:2] == [(0, 0), (0, 1)]
    assert started[2:] == [(1, 0), (1, 1), (1, 2), (0, 2)]  # 9 tokens expected against 2


def test_longest_first_ends_sooner_than_shortest_first():
    lengths = [[4]] * 12 + [[40]]
    history = LengthHistory()
    for prompt, (length,) in enumerate(lengths):
        history.record(np.full(4, prompt), [length])
    informed = Simulation([4] * 13, lengths, blocks=200, rows=4, history=history, caps=[50] * 13).run()
    blind = Simulation([4] * 13, lengths, blocks=200, rows=4, caps=[50] * 13).run()
    assert len(informed.active_rows) == 40
    assert len(blind.active_rows) == 52


def test_the_youngest_gives_way_and_the_oldest_never():
    simulation = Simulation([4, 4], [[30], [30]], blocks=12, block_size=4, rows=2)
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    assert [simulation.rows.sequences[s].order for s in simulation.rows.decode_slots] == [0]
    simulation.run()


def test_an_idle_prompt_gives_way_to_a_completion_that_could_start():
    """Group 0 waits with a low expectation while its prompt holds 10 of 12 blocks; a row once stayed empty."""
    simulation = Simulation([40, 4], [[2] * 4, [30] * 3], blocks=12, block_size=4, rows=2, caps=[40, 40])
    simulation.step()
    simulation.step()
    assert [len(g.sequences) - g.num_finished for g in simulation.groups] == [2, 3]
    assert simulation.step().sample_slots.size == 2
    assert simulation.groups[0].blocks.size == 0
    simulation.run()
    assert [s.num_output for s in simulation.groups[0].sequences] == [2] * 4


def test_work_per_step_does_not_grow_with_those_that_wait():
    """Function calls of a decode step are counted: the same with 50 and with 10,000 waiting completions."""

    def calls_of_steps(num_groups):
        simulation = Simulation([4] * num_groups, [[12] * 10] * num_groups, blocks=400, rows=32, budget=256)
        simulation.step(check=False)
        count = 0

        def tracer(_frame, event, _argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tracer)
        try:
            for _ in range(30):  # rows finish and are refilled in these steps
                simulation.step(check=False)
        finally:
            sys.setprofile(None)
        assert len(simulation.started) > 32
        return count

    assert calls_of_steps(1000) <= calls_of_steps(15) * 1.02


def test_rows_beyond_the_token_budget_are_refused():
    with pytest.raises(ValueError, match="9 rows do not fit in steps of max_batch_tokens=8"):
        Simulation([4], [[1]], blocks=10, rows=9, budget=8)


def test_torch_free_modules_import_without_torch():
    modules = (
        "scheduler",
        "admission",
        "block_manager",
        "sequence",
        "rows",
        "lengths",
        "noise",
        "stop",
        "stats",
        "drafts",
        "recall",
        "speculation",
        "step_cost",
        "request",
    )
    code = "import sys\n" + "".join(f"import sagc_fast.rollout.{name}\n" for name in modules)
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
