"""What several launchers share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's CPU interpreter; fixed when they are first imported (TRITON_INTERPRET=1)."""

LOG2E = 1.4426950408889634
"""Softmax works in powers of two: exp(x) = 2 ** (x * LOG2E)."""


def autotuned(configs: Sequence[triton.Config], key: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Measure ``configs`` at the first launch for each value of ``key``; the choice is kept on disk by Triton.

    The interpreter and ahead-of-time compilation take the first. Measuring synchronises, so the first launch must
    come before a CUDA graph is captured.
    """
    chosen = list(configs[:1]) if INTERPRETED else list(configs)
    return triton.autotune(chosen, key=list(key), cache_results=True)


def block_config(block_m: int, block_n: int, num_warps: int, num_stages: int) -> triton.Config:
    """A configuration of a kernel over blocks of queries (BLOCK_M) and keys (BLOCK_N)."""
    return triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=num_warps, num_stages=num_stages)


def tuned_by_width(
    kernel: Any, configs: dict[int, list[triton.Config]], fp32_config: dict[int, triton.Config]
) -> dict[tuple[int, bool], Any]:
    """An attention kernel by padded head width and whether it computes in fp32. Exact products run without tensor
    cores: with larger tiles they spill by the thousand or exceed shared memory, so fp32 has a tile of its own."""
    key = ["GROUP", "D"]
    tuned = {(width, False): autotuned(choice, key)(kernel) for width, choice in configs.items()}
    return tuned | {(width, True): autotuned([choice], key)(kernel) for width, choice in fp32_config.items()}


def block_of(size: int, smallest: int = 16) -> int:
    """The power of two that holds ``size`` elements; tensor-core products need at least 16."""
    return max(smallest, 1 << (size - 1).bit_length())


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; the interpreter pretends to have few, so that splits are exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
