"""Sampling with top-k, top-p and min-p, exactly, without a sort: one program per row.

Ordered by falling probability (ties by lower id), every filter keeps a prefix, so a row needs one threshold and the
number of tokens kept that equal it. The bits of ``max z - z`` (never negative) rise with it as integers; a search over
them, bit by bit from the top, finds the threshold in 31 passes over the row for top-k and again for top-p. min-p is a
direct comparison. Rows without any filter should go through sample_blocks and sample_pick, which read the row once.

Traffic: up to 66 x V logits per row, all but the first pass from L2. Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sagc_fast.kernels.philox import uniform

BLOCK_V = 4096
"""Tokens of one step of a pass."""


@triton.jit
def _distance(row_ptr, offs, vocab_size, temperature, largest):
    """``max z - z``, from 0 to +inf; past the vocabulary +inf."""
    z = tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
    return largest - tl.div_rn(z, temperature)


@triton.jit
def _threshold(row_ptr, vocab_size, temperature, largest, target, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key for which the tokens with smaller keys number (or weigh) less than ``target``, and their sum."""
    key = tl.zeros([], tl.int32)
    below = tl.zeros([], tl.float64)
    bit = tl.full([], 1 << 30, tl.int32)
    for _ in range(31):
        candidate = key | bit
        bit = bit >> 1
        sum_V = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocab_size, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            distance = _distance(row_ptr, offs, vocab_size, temperature, largest)
            is_below = (distance.to(tl.int32, bitcast=True) < candidate) & (offs < vocab_size)
            if IS_COUNT:
                sum_V += tl.where(is_below, 1.0, 0.0).to(tl.float64)
            else:
                sum_V += tl.where(is_below, tl.exp(-distance), 0.0).to(tl.float64)
        total = tl.sum(sum_V, 0)
        is_less = total < target
        key = tl.where(is_less, candidate, key)
        below = tl.where(is_less, total, below)
    return key, below


@triton.jit
def sample_filtered_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, seed_ptr, prompt_ptr, sample_ptr,
    position_ptr, token_ptr, logprob_ptr, stride, vocab_size,
    IS_KEYED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0.0
    temperature = tl.where(is_greedy, 1.0, temperature)
    offs_v = tl.arange(0, BLOCK)

    largest = tl.full([], float("-inf"), tl.float32)
    likeliest = tl.zeros([], tl.int32)
    num_bad = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        offs = start + offs_v
        z = tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
        z = tl.div_rn(z, temperature)
        num_bad += tl.sum(((z != z) | (z == float("inf"))).to(tl.int32), 0)
        block_largest, first = tl.max(z, 0, return_indices=True)
        likeliest = tl.where(block_largest > largest, start + first, likeliest)
        largest = tl.maximum(largest, block_largest)
    is_bad = (num_bad > 0) | (largest == float("-inf"))
    largest = tl.where(is_bad, 0.0, largest)

    # Everything with a key below `key`, and the first `num_ties` of those that have it.
    key = tl.full([], 0x7FFFFFFF, tl.int32)
    num_ties = tl.zeros([], tl.float64)
    may_filter = (is_greedy == 0) & (is_bad == 0)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    min_p = tl.where(may_filter, tl.load(min_p_ptr + row), 0.0).to(tl.float64)
    if may_filter & (top_k > 0) & (top_k < vocab_size):
        key, below = _threshold(row_ptr, vocab_size, temperature, largest, top_k.to(tl.float64), True, BLOCK)
        num_ties = top_k.to(tl.float64) - below
    if may_filter & (top_p < 1.0):
        sum_V = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocab_size, BLOCK):
            distance = _distance(row_ptr, start + offs_v, vocab_size, temperature, largest)
            is_below = distance.to(tl.int32, bitcast=True) < key
            sum_V += tl.where(is_below, tl.exp(-distance), 0.0).to(tl.float64)
        tie_weight = tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)
        mass = tl.sum(sum_V, 0) + tl.where(num_ties > 0.0, num_ties * tie_weight, 0.0)
        target = top_p * mass
        key, below = _threshold(row_ptr, vocab_size, temperature, largest, target, False, BLOCK)
        tie_weight = tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)
        num_ties = tl.where(tie_weight > 0.0, (target - below) / tie_weight, 0.0)

    total = tl.zeros([], tl.float64)
    ties_before = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        distance = _distance(row_ptr, start + offs_v, vocab_size, temperature, largest)
        bits = distance.to(tl.int32, bitcast=True)
        is_tie = (bits == key).to(tl.int32)
        rank = ties_before + tl.cumsum(is_tie, 0) - is_tie
        weight = tl.exp(-distance).to(tl.float64)
        is_kept = (bits < key) | ((is_tie > 0) & (rank.to(tl.float64) < num_ties))
        total += tl.sum(tl.where(is_kept & (weight >= min_p), weight, 0.0), 0)
        ties_before += tl.sum(is_tie, 0)

    if IS_KEYED:
        u = uniform(
            tl.load(seed_ptr + row), tl.load(prompt_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + row)
        )
    else:
        u = tl.load(uniform_ptr + row)
    threshold = tl.minimum(u * total, total * 0.9999999999999999)
    cumulative = tl.zeros([], tl.float64)
    ties_before = tl.zeros([], tl.int32)
    token = tl.full([], 0x7FFFFFFF, tl.int32)
    last = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        distance = _distance(row_ptr, start + offs_v, vocab_size, temperature, largest)
        bits = distance.to(tl.int32, bitcast=True)
        is_tie = (bits == key).to(tl.int32)
        rank = ties_before + tl.cumsum(is_tie, 0) - is_tie
        weight = tl.exp(-distance).to(tl.float64)
        is_kept = (bits < key) | ((is_tie > 0) & (rank.to(tl.float64) < num_ties))
        weight = tl.where(is_kept & (weight >= min_p), weight, 0.0)
        reached = cumulative + tl.cumsum(weight, 0)
        is_hit = (reached > threshold) & (weight > 0.0)
        token = tl.minimum(token, tl.min(tl.where(is_hit, start + offs_v, 0x7FFFFFFF), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, start + offs_v, 0), 0))
        cumulative += tl.sum(weight, 0)
        ties_before += tl.sum(is_tie, 0)
    token = tl.minimum(token, last)
    token = tl.where(is_bad, 0, tl.where(is_greedy, likeliest, token))
    z = tl.div_rn(tl.load(row_ptr + token).to(tl.float32), temperature) - largest
    logprob = (z.to(tl.float64) - tl.log(total)).to(tl.float32)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(is_bad, float("nan"), logprob))


def sample_filtered(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor | None,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 token [R], fp32 log-prob [R], renormalised over the kept tokens). A row whose logits are not finite gets
    token 0 and NaN; temperature 0 takes the likeliest token, whatever the filters.

    Args:
        logits_RV: any float dtype, the last axis contiguous.
        temperature_R, top_p_R, min_p_R: fp32; top_p 1 and min_p 0 are off.
        top_k_R: int64; 0 is off.
        uniform_R, keys: as in sample_pick.
    """
    num_rows, vocab_size = logits_RV.shape
    token_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    logprob_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    is_keyed = uniform_R is None
    if num_rows:
        sample_filtered_kernel[(num_rows,)](
            logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, uniform_R, *(keys if is_keyed else (None,) * 4),
            token_R, logprob_R, logits_RV.stride(0), vocab_size,
            IS_KEYED=is_keyed, BLOCK=BLOCK_V, num_warps=8,
        )  # fmt: skip
    return token_R, logprob_R
