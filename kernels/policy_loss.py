"""The clipped policy loss of a token and its derivatives, in one pass over flat token arrays.

With r = exp(logp - old), A the advantage and w = exp(old - rollout), detached (the formula and its sources:
sagc_fast/algo/loss.py):

    clip:   J = min(r A, clip(r) A), bounded below by c A for A < 0 with a dual clip;   cispo: J = clip(r) A logp
    l = a (-w J + beta KL - coef H)          a: 1 / (length x normaliser) or 1 / normaliser, given per token

Written: l, dl/dlogp, dl/dH = -a coef, and per token the quantities whose sums the log shows. Memory bound: up to
8 numbers read and 11 written per token. Shape suffixes: N tokens, C completions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_FIGURES = 8
"""Columns of the figures: clip_low, clip_high, dual_clip, ratio, approx_kl, ref_kl, is_weight, is_limited."""
LOG_RATIO_LIMIT = 20.0
"""Ratios beyond e^20 are constant, as in sagc_fast/algo/loss.py."""


@triton.jit(do_not_specialize=["num_tokens"])
def policy_loss_kernel(
    logp_ptr, old_ptr, advantage_ptr, completion_ptr, factor_ptr, mask_ptr, entropy_ptr, ref_ptr, rollout_ptr,
    loss_ptr, grad_logp_ptr, grad_entropy_ptr, figures_ptr, num_tokens,
    clip_low, clip_high, dual_clip, kl_beta, entropy_coef, is_cap, is_floor,
    LIMIT: tl.constexpr, IS_CISPO: tl.constexpr, HAS_DUAL: tl.constexpr, KL: tl.constexpr, IS_MODE: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < num_tokens
    is_token = is_in
    if HAS_MASK:
        is_token = is_token & (tl.load(mask_ptr + offs, mask=is_in, other=0) != 0)
    # What a mask hides is not even read: a NaN there must not reach a sum or a gradient.
    logp = tl.load(logp_ptr + offs, mask=is_token, other=0.0)
    old = tl.load(old_ptr + offs, mask=is_token, other=0.0)
    completion = tl.load(completion_ptr + offs, mask=is_token, other=0)
    advantage = tl.load(advantage_ptr + completion, mask=is_token, other=0.0)
    factor = tl.load(factor_ptr + completion, mask=is_token, other=0.0)

    log_ratio = logp - old
    limited = tl.minimum(tl.maximum(log_ratio, -LIMIT), LIMIT)
    ratio = tl.exp(limited)
    clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip_low), 1.0 + clip_high)
    is_dual = advantage != advantage
    if IS_CISPO:
        objective = clipped * advantage * logp
        slope = clipped * advantage
    else:
        objective = tl.minimum(ratio * advantage, clipped * advantage)
        # At a tie of unequal branches both derivatives are meant to be taken; clip(r) = r there, so one will do.
        is_free = ratio * advantage <= clipped * advantage
        is_moving = (log_ratio >= -LIMIT) & (log_ratio <= LIMIT)
        slope = tl.where(is_free & is_moving, ratio * advantage, 0.0)
        if HAS_DUAL:
            is_dual = (advantage < 0.0) & (objective < dual_clip * advantage)
            objective = tl.where(is_dual, dual_clip * advantage, objective)
            slope = tl.where(is_dual, 0.0, slope)
    weight = tl.zeros([BLOCK], tl.float32)
    is_limited = is_dual & (is_dual == 0)
    if IS_MODE != 0:
        rollout = tl.load(rollout_ptr + offs, mask=is_token, other=0.0)
        weight = tl.exp(tl.minimum(tl.maximum(old - rollout, -LIMIT), LIMIT))
        if IS_MODE == 1:
            is_limited = weight > is_cap
            kept = tl.minimum(weight, is_cap)
        else:
            is_limited = (weight > is_cap) | (weight < is_floor)
            kept = tl.where(is_limited, 0.0, weight)
        objective *= kept
        slope *= kept
    loss = -objective
    grad = -slope
    kl = tl.zeros([BLOCK], tl.float32)
    if KL != 0:
        u = tl.load(ref_ptr + offs, mask=is_token, other=0.0) - logp
        if KL == 1:
            kl = -u
            kl_slope = u * 0.0 + 1.0
        elif KL == 2:
            kl = u * u / 2
            kl_slope = -u
        else:
            is_moving_u = (u >= -LIMIT) & (u <= LIMIT)
            u = tl.minimum(tl.maximum(u, -LIMIT), LIMIT)
            # exp(u) - 1 - u by its series where the difference would cancel
            series = u * u * (0.5 + u * (0.16666667 + u * (0.041666668 + u * 0.008333334)))
            kl = tl.where(tl.abs(u) < 0.1, series, tl.exp(u) - 1.0 - u)
            kl_slope = tl.where(is_moving_u, 1.0 - tl.exp(u), 0.0)
        loss += kl_beta * kl
        grad += kl_beta * kl_slope
    if HAS_ENTROPY:
        loss -= entropy_coef * tl.load(entropy_ptr + offs, mask=is_token, other=0.0)
        tl.store(grad_entropy_ptr + offs, tl.where(is_token, -entropy_coef * factor, 0.0), mask=is_in)
    tl.store(loss_ptr + offs, tl.where(is_token, loss * factor, 0.0), mask=is_in)
    tl.store(grad_logp_ptr + offs, tl.where(is_token, grad * factor, 0.0), mask=is_in)

    is_low = (ratio < 1.0 - clip_low) & (IS_CISPO | (advantage < 0.0)) & is_token
    is_high = (ratio > 1.0 + clip_high) & (IS_CISPO | (advantage > 0.0)) & is_token
    x = limited
    series = x * x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.008333334)))
    approx_kl = tl.where(tl.abs(x) < 0.1, series, tl.exp(x) - 1.0 - x)
    base = figures_ptr + offs
    tl.store(base, is_low.to(tl.float32), mask=is_in)
    tl.store(base + 1 * num_tokens, is_high.to(tl.float32), mask=is_in)
    tl.store(base + 2 * num_tokens, (is_dual & is_token).to(tl.float32), mask=is_in)
    tl.store(base + 3 * num_tokens, tl.where(is_token, ratio, 0.0), mask=is_in)
    tl.store(base + 4 * num_tokens, tl.where(is_token, approx_kl, 0.0), mask=is_in)
    tl.store(base + 5 * num_tokens, tl.where(is_token, kl, 0.0), mask=is_in)
    tl.store(base + 6 * num_tokens, tl.where(is_token, weight, 0.0), mask=is_in)
    tl.store(base + 7 * num_tokens, (is_limited & is_token).to(tl.float32), mask=is_in)


def policy_loss(
    logp_N: torch.Tensor,
    old_logp_N: torch.Tensor,
    advantages_C: torch.Tensor,
    completion_index_N: torch.Tensor,
    factors_C: torch.Tensor,
    mask_N: torch.Tensor | None = None,
    entropy_N: torch.Tensor | None = None,
    ref_logp_N: torch.Tensor | None = None,
    rollout_logp_N: torch.Tensor | None = None,
    *,
    is_cispo: bool,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    kl_beta: float = 0.0,
    kl_estimator: int = 0,
    entropy_coef: float = 0.0,
    rollout_is: int = 0,
    is_cap: float = 0.0,
    is_floor: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [N], its derivative by logp [N], by entropy [N], figures [NUM_FIGURES, N]), all fp32.

    Args:
        factors_C: fp32, the factor a of each completion's tokens.
        mask_N: bool, tokens that count; the others get zeros.
        kl_estimator: 1, 2, 3 for k1, k2, k3; 0 without a reference.
        rollout_is: 0 none, 1 truncate, 2 mask.
        Other tensors fp32 (index int64), contiguous; see sagc_fast.algo.loss.policy_loss for the meaning.
    """
    num_tokens = len(logp_N)
    loss_N, grad_logp_N = (torch.empty(num_tokens, dtype=torch.float32, device=logp_N.device) for _ in "lg")
    grad_entropy_N = torch.zeros(num_tokens, dtype=torch.float32, device=logp_N.device)
    figures = torch.empty(NUM_FIGURES, num_tokens, dtype=torch.float32, device=logp_N.device)
    if num_tokens:
        policy_loss_kernel[(triton.cdiv(num_tokens, 512),)](
            logp_N, old_logp_N, advantages_C, completion_index_N, factors_C, mask_N, entropy_N, ref_logp_N,
            rollout_logp_N, loss_N, grad_logp_N, grad_entropy_N, figures, num_tokens,
            float(clip_low), float(clip_high), float(dual_clip or 0.0), float(kl_beta), float(entropy_coef),
            float(is_cap), float(is_floor),
            LIMIT=LOG_RATIO_LIMIT, IS_CISPO=is_cispo, HAS_DUAL=dual_clip is not None, KL=kl_estimator,
            IS_MODE=rollout_is, HAS_MASK=mask_N is not None, HAS_ENTROPY=entropy_N is not None, BLOCK=512, num_warps=4,
        )  # fmt: skip
    return loss_N, grad_logp_N, grad_entropy_N, figures
