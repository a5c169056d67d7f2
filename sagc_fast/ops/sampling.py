"""Exact sampling from logits with given uniform numbers, in plain torch.

Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import itertools

import torch

DRAW_BYTES = 2**20
"""Bound on the fp32 logits drawn from at a time on the CPU; the draw's temporaries are several times as much (ours)."""


def sample_tokens(
    logits_RV: torch.Tensor,
    uniform_R: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor | None = None,
    top_p_R: torch.Tensor | None = None,
    min_p_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverse CDF: (token [R] int64, log-prob [R] fp32).

    With z = logits / temperature, the token is the smallest v whose cumulative sum of exp(z - max z) exceeds u times
    the total; sums are fp64, u is float64 in [0, 1). The log-prob is ``z[v] - logsumexp(z)``. Filters apply in the
    order top-k, top-p, min-p, each to the distribution left by the one before, ties to the lower id, and the log-prob
    is renormalised over the kept tokens; a row switches one off with 0, 1.0, 0.0, and None switches it off for all.
    Temperature 0 takes the likeliest token (lowest id among equals) whatever the filters, with its log-prob at
    temperature 1. A token of probability 0 is never drawn. Rows do not affect each other's bits.

    Raises RuntimeError when a row holds NaN or +inf, or nothing but -inf.
    """
    is_cpu = logits_RV.device.type == "cpu"  # elsewhere few large operations count for more than memory
    num_at_once = max(1, DRAW_BYTES // (4 * logits_RV.shape[1]) if is_cpu else logits_RV.shape[0])
    columns = (logits_RV, uniform_R, temperature_R, top_k_R, top_p_R, min_p_R)
    parts = zip(*(itertools.repeat(None) if x is None else x.split(num_at_once) for x in columns), strict=False)
    draws = [sample_marked_tokens(*part) for part in parts]
    tokens_R, logprobs_R = (torch.cat(column) for column in zip(*draws, strict=True))
    is_bad_R = torch.isnan(logprobs_R)
    if bool(is_bad_R.any()):
        raise RuntimeError(not_finite(int(is_bad_R.sum()), len(is_bad_R)))
    return tokens_R, logprobs_R


def not_finite(num_bad: int, num_rows: int) -> str:
    """What to say about rows that nothing can be drawn from."""
    return (
        f"Logits are not finite in {num_bad} of {num_rows} rows; the policy's weights have most likely diverged (lower "
        "the learning rate or resume from an earlier checkpoint)."
    )


def sample_marked_tokens(
    logits_RV: torch.Tensor,
    uniform_R: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor | None = None,
    top_p_R: torch.Tensor | None = None,
    min_p_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sample_tokens` that looks at no value, so that it can be captured into a CUDA graph: where it would raise,
    the row's token is 0 and its log-prob NaN."""
    is_greedy_R = temperature_R == 0
    z_RV = logits_RV.float() / torch.where(is_greedy_R, 1.0, temperature_R).to(torch.float32).unsqueeze(1)
    largest_R1 = z_RV.amax(-1, keepdim=True)
    is_bad_R1 = ~torch.isfinite(largest_R1)
    z_RV -= largest_R1
    is_removed_RV = _filtered(z_RV, ~is_greedy_R, top_k_R, top_p_R, min_p_R)
    if is_removed_RV is not None:
        z_RV.masked_fill_(is_removed_RV, float("-inf"))
    weights_RV = z_RV.exp().double()
    # A scan on a GPU adds in parallel: a sum may move by a rounding at a step of weight 0, so only positive ones count.
    reached_RV = weights_RV.cumsum(-1).masked_fill_(weights_RV == 0, 0)
    total_R1 = reached_RV.amax(-1, keepdim=True)
    # The threshold stays below the total even where u was rounded to 1, so there is a step that passes it.
    threshold_R1 = torch.minimum(
        uniform_R.double().unsqueeze(1) * total_R1, torch.nextafter(total_R1, total_R1.new_zeros(()))
    )
    token_R1 = (reached_RV > threshold_R1).view(torch.uint8).argmax(-1, keepdim=True)
    token_R1 = torch.where(is_greedy_R.unsqueeze(1), z_RV.argmax(-1, keepdim=True), token_R1)
    token_R1 = torch.where(is_bad_R1, 0, token_R1)
    logprob_R1 = z_RV.gather(1, token_R1).double() - total_R1.log()
    return token_R1.squeeze(1), logprob_R1.masked_fill_(is_bad_R1, float("nan")).squeeze(1).float()


def _filtered(
    z_RV: torch.Tensor,
    may_filter_R: torch.Tensor,
    top_k_R: torch.Tensor | None,
    top_p_R: torch.Tensor | None,
    min_p_R: torch.Tensor | None,
) -> torch.Tensor | None:
    """Mask [R, V] of the tokens that the filters remove, or None when no row filters.

    Ordered by falling probability, each of the three filters keeps a prefix, so a row needs one number.
    """
    if top_k_R is None and top_p_R is None and min_p_R is None:
        return None
    vocab_size = z_RV.shape[1]
    sorted_RV, order_RV = torch.sort(z_RV, dim=-1, descending=True, stable=True)
    weights_RV = sorted_RV.exp().double()
    cumulative_RV = weights_RV.cumsum(-1)
    num_kept_R = torch.full_like(order_RV[:, 0], vocab_size)
    if top_k_R is not None:
        num_kept_R = torch.where(top_k_R > 0, top_k_R.clamp(max=vocab_size), num_kept_R)
    if top_p_R is not None:
        kept_mass_R1 = cumulative_RV.gather(1, num_kept_R.unsqueeze(1) - 1)
        mass_before_RV = cumulative_RV - weights_RV
        in_nucleus_R = (mass_before_RV < top_p_R.double().unsqueeze(1) * kept_mass_R1).sum(-1)
        num_kept_R = torch.where(top_p_R < 1, torch.minimum(num_kept_R, in_nucleus_R), num_kept_R)
    if min_p_R is not None:
        likely_R = (weights_RV >= min_p_R.double().unsqueeze(1) * weights_RV[:, :1]).sum(-1)
        num_kept_R = torch.where(min_p_R > 0, torch.minimum(num_kept_R, likely_R), num_kept_R)
    num_kept_R = torch.where(may_filter_R, num_kept_R, vocab_size)
    is_removed_sorted_RV = torch.arange(vocab_size, device=z_RV.device) >= num_kept_R.unsqueeze(1)
    return torch.zeros_like(is_removed_sorted_RV).scatter_(1, order_RV, is_removed_sorted_RV)
