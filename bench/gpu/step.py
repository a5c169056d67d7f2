"""One optimizer step of a model's shape on 8 groups of 16 completions, phase by phase.

    python -m gpu.step 3B 0.5B

The second step is measured: the first one compiles, and makes the optimizer's moments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpu.device import DEVICE, DTYPE, REHEARSAL, ceilings, config_of, free_memory, random_model, shape_of, synchronize
from gpu.report import part, row
from sagc_fast import TrainConfig
from sagc_fast.bench.workload import Workload
from sagc_fast.profiling import Recorder, recording
from sagc_fast.tasks.base import Problem, Score
from sagc_fast.train.optimizer import PolicyOptimizer
from sagc_fast.train.sampling import ScoredGroup
from sagc_fast.train.update import PolicyUpdater
from sagc_fast.types import Completion, Group

WORKLOAD = Workload(2, 2, mean_length=8, max_length=10, min_prompt=8, max_prompt=16) if REHEARSAL else Workload()
MICRO_BATCH_TOKENS = 64 if REHEARSAL else 8192


def scored_groups() -> list[ScoredGroup]:
    """Groups of the workload's lengths with made-up tokens and rewards."""
    groups = []
    for index, (prompt, lengths) in enumerate(zip(WORKLOAD.prompts(), WORKLOAD.lengths(), strict=True)):
        completions = [
            Completion(i, [4 + (13 * i + j) % 4000 for j in range(n)], [-8.0] * n, "stop", None)
            for i, n in enumerate(lengths)
        ]
        scores = [Score(float(i % 2), bool(i % 2)) for i in range(len(lengths))]
        group = Group(prompt_index=index, prompt_token_ids=prompt, completions=completions, prompt_id=index)
        groups.append(ScoredGroup(group, Problem(prompt=""), scores))
    return groups


@contextmanager
def synchronized(name: str) -> Iterator[None]:
    """A range that ends when the device has done what it asked for."""
    synchronize()
    try:
        yield
    finally:
        synchronize()


def measure(name: str) -> None:
    """The second of two updates of one model."""
    model = random_model(config_of(name))
    config = TrainConfig.from_dict(
        {
            "model": {"path": "none", "dtype": "fp32" if REHEARSAL else "bf16", "device": DEVICE.type},
            "task": {"name": "addition"},
            "algo": {"name": "grpo"},
            "optimizer": {"warmup_steps": 0},
            "update": {"micro_batch_tokens": MICRO_BATCH_TOKENS},
        },
        where="gpu_check",
    )
    updater = PolicyUpdater(
        model, None, PolicyOptimizer(model, config.optimizer), config.algorithm, config.update,
        max_length=WORKLOAD.max_length, temperature=1.0, seed=0,
    )  # fmt: skip
    groups = scored_groups()
    updater.update(1, groups)
    synchronize()
    recorder = Recorder(synchronized)
    with recording(recorder):
        recorder.open()
        result = updater.update(2, groups)
        synchronize()
    if result.num_updates != 1:
        raise RuntimeError(f"the update was skipped: {result}")
    shape, seconds = shape_of(model.config), recorder.root.children["update"].seconds
    targets = sum(len(c.token_ids) for g in groups for c in g.group.completions)
    # Three times the forward's products: one forward, two in backward.
    flops = 3 * (shape.layer_flops_per_token() * result.num_tokens + shape.head_flops_per_row() * targets)
    row(
        f"update, {name}, {len(groups)} x {len(groups[0].group.completions)}", result.num_tokens / seconds,
        "tokens/s", beside=f"{1e3 * seconds:,.1f} ms, {result.num_tokens:,} tokens, {DTYPE}",
    )  # fmt: skip
    row(f"dense products of the update, {name}", flops / seconds / 1e12, "TFLOP/s",
        ceiling=ceilings()["matrix_flops"] / 1e12)  # fmt: skip
    for depth, phase, record, _ in recorder.root.rows():
        if depth:
            row("  " * depth + phase, 1e3 * record.seconds, "ms", beside=f"{record.seconds / seconds:.0%}")
    if DEVICE.type == "cuda":
        row("most memory held", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def main(names: list[str]) -> None:
    with part() as outcome:
        for name in names[: 1 if REHEARSAL else None]:  # whose shapes are all tiny there
            with outcome.section(f"step, {name}"):
                measure(name)
            free_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
