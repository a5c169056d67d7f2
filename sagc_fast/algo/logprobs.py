"""How far the log-probs of the rollout lie from those that training computes for the same tokens.

With the same weights both should agree to rounding; a difference means that the sampled and the trained distribution
are not the same one. Shape suffixes: N completion tokens, flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Over unmasked tokens, of d = log pi_train - log pi_rollout; all 0 when there is no token."""

    mean_abs: float
    max_abs: float
    mean: float
    """Signed: its negative is the k1 estimate of KL(rollout || train)."""
    kl: float
    """k3 estimate of KL(rollout || train): mean of exp(d) - 1 - d, never negative."""
    num_tokens: int


def logprob_difference(
    train_logp_N: torch.Tensor, rollout_logp_N: torch.Tensor, mask_N: torch.Tensor | None = None
) -> LogprobDifference:
    """Compare the two in float64. A NaN on either side shows as NaN."""
    difference_N = train_logp_N.detach().double() - rollout_logp_N.detach().double()
    if mask_N is not None:
        difference_N = difference_N[mask_N.bool()]
    if difference_N.numel() == 0:
        return LogprobDifference(0.0, 0.0, 0.0, 0.0, 0)
    return LogprobDifference(
        mean_abs=float(difference_N.abs().mean()),
        max_abs=float(difference_N.abs().max()),
        mean=float(difference_N.mean()),
        kl=float((torch.expm1(difference_N) - difference_N).mean()),
        num_tokens=difference_N.numel(),
    )


def merge_differences(parts: Sequence[LogprobDifference]) -> LogprobDifference | None:
    """Those of separate sets of tokens as one; None of none."""
    if not parts:
        return None
    count = sum(part.num_tokens for part in parts)

    def mean(name: str) -> float:
        return sum(getattr(part, name) * part.num_tokens for part in parts) / max(count, 1)

    return LogprobDifference(mean("mean_abs"), max(p.max_abs for p in parts), mean("mean"), mean("kl"), count)
