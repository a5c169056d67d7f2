"""Keyed noise on the device: Philox4x32-10 (Salmon et al., SC 2011), the same numbers as sagc_fast/rollout/noise.py.

The key is the 64-bit seed, the counter (prompt id low, prompt id high, sample index, position). ``uniform`` is what
other kernels call; the kernel here only writes its numbers out. Computing: about 100 integer operations per number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def uniform(seed, prompt_id, sample_index, position):
    """float64 in [0, 1) with 53 random bits. All arguments int64, read as unsigned 64- and 32-bit numbers."""
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    word_0 = prompt_id.to(tl.uint32)
    word_1 = (prompt_id >> 32).to(tl.uint32)
    word_2 = sample_index.to(tl.uint32)
    word_3 = position.to(tl.uint32)
    for _ in tl.static_range(10):
        product_0 = word_0.to(tl.uint64) * 0xD2511F53
        product_2 = word_2.to(tl.uint64) * 0xCD9E8D57
        word_0 = (product_2 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1 = product_2.to(tl.uint32)
        word_3 = product_0.to(tl.uint32)
        key_0 = (key_0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        key_1 = (key_1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    high = (word_0 >> 5).to(tl.int64)
    low = (word_1 >> 6).to(tl.int64)
    return (high * 67108864 + low).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["num_rows"])
def uniforms_kernel(seed_ptr, prompt_ptr, sample_ptr, position_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < num_rows
    fields = uniform(
        tl.load(seed_ptr + offs, mask=is_in, other=0),
        tl.load(prompt_ptr + offs, mask=is_in, other=0),
        tl.load(sample_ptr + offs, mask=is_in, other=0),
        tl.load(position_ptr + offs, mask=is_in, other=0),
    )
    tl.store(out_ptr + offs, fields, mask=is_in)


def uniforms(
    seed_R: torch.Tensor, prompt_id_R: torch.Tensor, sample_index_R: torch.Tensor, position_R: torch.Tensor
) -> torch.Tensor:
    """float64 [R] in [0, 1). Arguments int64 [R], contiguous; the first two hold the bits of unsigned numbers."""
    out_R = torch.empty(seed_R.shape, dtype=torch.float64, device=seed_R.device)
    if len(out_R):
        uniforms_kernel[(triton.cdiv(len(out_R), 128),)](
            seed_R, prompt_id_R, sample_index_R, position_R, out_R, len(out_R), BLOCK=128, num_warps=4
        )
    return out_R
