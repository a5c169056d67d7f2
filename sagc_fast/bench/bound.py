"""How fast a rollout could be at best on this machine, and what share of that was reached.

    bound = weight bytes x steps / read rate + arithmetic / rate of the dense products

Weights are read once a step, whatever the rows; arithmetic counts the dense products of every token, the head of every
sampled one and the attention over each one's context. Both rates are measured in the same run (ceilings.py). A model
that fits into caches can beat the first term, and reading keys and values is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sagc_fast.bench.ceilings import Ceilings
from sagc_fast.bench.models import Shape

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds on one clock (``cpu``: per CPU second of one thread; ``wall``: with all threads of the run)."""

    clock: str
    weight_seconds: float
    arithmetic_seconds: float
    gigaflops: float
    weight_gigabytes: float

    @property
    def seconds(self) -> float:
        return self.weight_seconds + self.arithmetic_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def rollout_flops(shape: Shape, prompts: Sequence[int], lengths: Sequence[Sequence[int]]) -> float:
    """Floating-point operations of a rollout that computes nothing twice. ``prompts``: their lengths in tokens."""
    tokens = rows = contexts = 0
    for prompt, group in zip(prompts, lengths, strict=True):
        tokens += prompt + sum(group) - len(group)  # the last token of a completion is never fed back
        rows += sum(group)
        contexts += prompt * (prompt + 1) // 2  # causal: position i attends to i + 1 positions
        contexts += sum((length - 1) * prompt + length * (length - 1) // 2 for length in group)
    return shape.layer_flops_per_token() * tokens + shape.head_flops_per_row() * rows + shape.attention_flops(contexts)


def decode_flops(shape: Shape, rows: int, context: float) -> float:
    """Of one decode step with ``rows`` live rows that attend to ``context`` positions each, on average."""
    per_row = shape.layer_flops_per_token() + shape.head_flops_per_row()
    return rows * per_row + shape.attention_flops(rows * context)


def rollout_bound(shape: Shape, dtype: str, ceilings: Ceilings, steps: int, flops: float, clock: str) -> Bound:
    """The bound for a rollout of ``steps`` engine steps and ``flops`` operations."""
    weight_bytes = shape.weight_elements * ITEM_BYTES[dtype] * steps
    return Bound(
        clock,
        weight_bytes / ceilings.read_bytes.per_second(clock),
        flops / ceilings.gemm_flops[dtype].per_second(clock),
        flops / 1e9,
        weight_bytes / 1e9,
    )
