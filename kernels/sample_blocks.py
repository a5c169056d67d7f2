"""Sampling, first of two kernels: maximum, sum of exponentials and first maximum of every block of the vocabulary.

This is the one pass over the logits; sample_pick reads one more block per row. A block's exponentials are taken against
its own maximum and summed in fp64. Memory bound: V logits per row are read once. The grid is rows x blocks, so few rows
fill the device as well as many. Shape suffixes: R rows, V vocabulary, B blocks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_V = 4096
"""Tokens of a block."""


@triton.jit
def sample_blocks_kernel(
    logits_ptr, temperature_ptr, largest_ptr, total_ptr, first_ptr, stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offs = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    z = tl.load(logits_ptr + row * stride + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
    z = tl.div_rn(z, temperature)
    is_bad = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0) > 0
    largest, first = tl.max(z, 0, return_indices=True)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(z - base).to(tl.float64), 0)
    place = row * tl.num_programs(1) + block
    tl.store(largest_ptr + place, tl.where(is_bad, float("nan"), largest))
    tl.store(total_ptr + place, total)
    tl.store(first_ptr + place, block * BLOCK + first)


def sample_blocks(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(fp32 maximum, fp64 sum of exp(z - maximum), int32 first token with the maximum), each [R, B].

    z = logits / temperature, with temperature 0 read as 1. A block that holds NaN or +inf has NaN for its maximum.

    Args:
        logits_RV: any float dtype, the last axis contiguous.
        temperature_R: fp32.
    """
    num_rows, vocab_size = logits_RV.shape
    shape = (num_rows, triton.cdiv(vocab_size, BLOCK_V))
    largest_RB, total_RB, first_RB = (
        torch.empty(shape, dtype=dtype, device=logits_RV.device)
        for dtype in (torch.float32, torch.float64, torch.int32)
    )
    if num_rows:
        sample_blocks_kernel[shape](
            logits_RV, temperature_R, largest_RB, total_RB, first_RB, logits_RV.stride(0), vocab_size,
            BLOCK=BLOCK_V, num_warps=8,
        )  # fmt: skip
    return largest_RB, total_RB, first_RB
