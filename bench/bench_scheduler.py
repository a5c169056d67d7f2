"""What planning a step costs when many completions wait: the scheduler alone, no model.

usage: python bench/bench_scheduler.py [--waiting 100 1000 10000] [--rows 128] [--steps 300]

Groups of 16 with prompts of 100 tokens; completions are cut at 512 tokens or end by chance, some 60 tokens on average;
every plan is committed as a model would. Prints plans (schedule + commit + finish) per CPU second in the steady state,
while all rows are taken and the rest waits, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from sagc_fast.rollout.admission import AdmissionQueue
from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.rollout.lengths import LengthHistory
from sagc_fast.rollout.rows import RowTable
from sagc_fast.rollout.scheduler import Scheduler
from sagc_fast.rollout.sequence import PromptGroup, Sequence
from sagc_fast.types import SamplingParams

GROUP_SIZE, PROMPT_TOKENS, MOST_TOKENS, MEAN_TOKENS, BLOCK_SIZE = 16, 100, 512, 60, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    results = {}
    for waiting in args.waiting:
        steps, finished, seconds = run(waiting, args.rows, args.steps)
        results[waiting] = round(steps / seconds)
        print(
            f"{waiting:6} waiting, {args.rows} rows: {results[waiting]:6,} steps per CPU second "
            f"({1e6 * seconds / steps:.0f} us a step, {finished} completions ended in {steps} steps)",
            flush=True,
        )
    print(json.dumps({"bench": "scheduler", "rows": args.rows, "steps_per_cpu_second": results}))


def make_scheduler(num_waiting: int, num_rows: int) -> Scheduler:
    """``num_waiting`` completions beyond the rows, and blocks for all rows at their longest."""
    rows = RowTable(num_rows, max_blocks=-(-(PROMPT_TOKENS + MOST_TOKENS) // BLOCK_SIZE))
    queue = AdmissionQueue(LengthHistory())
    params = SamplingParams(max_new_tokens=MOST_TOKENS)
    for index in range(-(-(num_waiting + num_rows) // GROUP_SIZE)):
        group = PromptGroup(index, index, np.zeros(PROMPT_TOKENS, dtype=np.int64))
        group.sequences += [Sequence(group, sample, params, MOST_TOKENS, end_set=0) for sample in range(GROUP_SIZE)]
        queue.add(group)
    blocks = BlockManager((num_rows + 1) * 2 * rows.block_tables.shape[1])
    return Scheduler(queue, rows, blocks, BLOCK_SIZE, max_batch_tokens=2048)


def one_step(scheduler: Scheduler, rng: np.random.Generator) -> int:
    """Plan, pretend to compute, retire; how many completions ended."""
    rows, plan = scheduler.rows, scheduler.schedule()
    scheduler.commit(plan, np.ones(plan.decode_slots.size, dtype=np.int64))
    slots = plan.sample_slots
    if not slots.size:
        return 0
    zeros = np.zeros(slots.size, dtype=np.int64)
    rows.append(slots, plan.sample_offsets, zeros, zeros.astype(np.float32))
    is_over = (rng.random(slots.size) < 1 / MEAN_TOKENS) | (rows.num_output[slots] >= MOST_TOKENS)
    ended = slots[is_over]
    return len(scheduler.finish(ended, np.ones_like(ended))) if ended.size else 0


def run(num_waiting: int, num_rows: int, num_steps: int) -> tuple[int, int, float]:
    """Steps, completions that ended, CPU seconds; only of steps at whose end somebody still waits."""
    scheduler, rng = make_scheduler(num_waiting, num_rows), np.random.default_rng(0)
    while scheduler.rows.num_free or not scheduler.rows.decode_slots.size:
        one_step(scheduler, rng)
    steps = finished = 0
    started = time.thread_time()
    while steps < num_steps and scheduler.queue.num_waiting:
        finished += one_step(scheduler, rng)
        steps += 1
    return max(steps, 1), finished, time.thread_time() - started


if __name__ == "__main__":
    main()
