"""Sampling, second of two kernels: the token at which the cumulative sum passes u x total, and its log-prob.

One program per row finds the block from the sums that sample_blocks left, then reads that block alone. u is given, or
made here from the keys (philox), so that a captured graph needs nothing from the host. Traffic: one block of logits per
row. Shape suffixes: R rows, V vocabulary, B blocks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels._launch import block_of
from sagc_fast.kernels.philox import uniform
from sagc_fast.kernels.sample_blocks import BLOCK_V


@triton.jit
def sample_pick_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, seed_ptr, prompt_ptr, sample_ptr, position_ptr,
    largest_ptr, total_ptr, first_ptr, token_ptr, logprob_ptr, stride, vocab_size, num_blocks,
    IS_KEYED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_b = tl.arange(0, BLOCK_B)
    is_b = offs_b < num_blocks
    largest_B = tl.load(largest_ptr + row * num_blocks + offs_b, mask=is_b, other=float("-inf"))
    total_B = tl.load(total_ptr + row * num_blocks + offs_b, mask=is_b, other=0.0)
    first_B = tl.load(first_ptr + row * num_blocks + offs_b, mask=is_b, other=0)
    is_bad = tl.max((largest_B != largest_B).to(tl.int32), 0) > 0
    largest, best_block = tl.max(largest_B, 0, return_indices=True)
    is_bad = is_bad | (largest == float("-inf"))
    base = tl.where(is_bad, 0.0, largest)
    weights_B = tl.where(is_b, total_B * tl.exp(largest_B - base).to(tl.float64), 0.0)
    cumulative_B = tl.cumsum(weights_B, 0)
    total = tl.max(cumulative_B, 0)
    if IS_KEYED:
        u = uniform(
            tl.load(seed_ptr + row), tl.load(prompt_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + row)
        )
    else:
        u = tl.load(uniform_ptr + row)
    # The threshold stays below the total even where u was rounded to 1, so the last positive step is found.
    threshold = tl.minimum(u * total, total * 0.9999999999999999)
    # A scan adds in parallel, so a sum may rise or fall by a rounding at a step of weight 0: only positive ones count.
    is_hit_B = (cumulative_B > threshold) & (weights_B > 0.0)
    block = tl.min(tl.where(is_hit_B, offs_b, BLOCK_B), 0)
    block = tl.minimum(block, tl.max(tl.where(weights_B > 0.0, offs_b, 0), 0))
    before = tl.sum(tl.where(offs_b == block - 1, cumulative_B, 0.0), 0)

    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0.0
    offs_v = tl.arange(0, BLOCK)
    is_v = block * BLOCK + offs_v < vocab_size
    z = tl.load(logits_ptr + row * stride + block * BLOCK + offs_v, mask=is_v, other=float("-inf")).to(tl.float32)
    z = tl.div_rn(z, tl.where(is_greedy, 1.0, temperature)) - base
    weights = tl.exp(z).to(tl.float64)
    cumulative = tl.cumsum(weights, 0)
    is_hit = (cumulative > threshold - before) & (weights > 0.0)
    place = tl.min(tl.where(is_hit, offs_v, BLOCK), 0)
    place = tl.minimum(place, tl.max(tl.where(weights > 0.0, offs_v, 0), 0))
    chosen = tl.sum(tl.where(offs_v == place, z, 0.0), 0)
    greedy_token = tl.sum(tl.where(offs_b == best_block, first_B, 0), 0)
    token = tl.where(is_greedy, greedy_token, block * BLOCK + place)
    logprob = tl.where(is_greedy, 0.0, chosen).to(tl.float64) - tl.log(total)
    tl.store(token_ptr + row, tl.where(is_bad, 0, token).to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(is_bad, float("nan"), logprob.to(tl.float32)))


def sample_pick(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    uniform_R: torch.Tensor | None,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 token [R], fp32 log-prob [R]). A row whose logits are not finite gets token 0 and NaN.

    Args:
        logits_RV, temperature_R: as given to sample_blocks; temperature 0 takes the likeliest token.
        blocks: what sample_blocks returned.
        uniform_R: float64 in [0, 1); None: made from ``keys``, the int64 [R] tensors (seed, prompt id, sample index,
            position).
    """
    num_rows, vocab_size = logits_RV.shape
    token_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    logprob_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    num_blocks = blocks[0].shape[1]
    is_keyed = uniform_R is None
    if num_rows:
        sample_pick_kernel[(num_rows,)](
            logits_RV, temperature_R, uniform_R, *(keys if is_keyed else (None,) * 4), *blocks, token_R, logprob_R,
            logits_RV.stride(0), vocab_size, num_blocks,
            IS_KEYED=is_keyed, BLOCK=BLOCK_V, BLOCK_B=block_of(num_blocks), num_warps=8,
        )  # fmt: skip
    return token_R, logprob_R
