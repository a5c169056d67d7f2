"""From scores to the rewards that advantages are made of: outcome reward, plus the price of length, minus KL.

Shape suffixes: C completions, N completion tokens, flat.
"""

from __future__ import annotations

import torch

from sagc_fast.algo.config import FilterConfig, LossConfig
from sagc_fast.algo.filters import overlong_cache_length, soft_overlong_punishment
from sagc_fast.algo.loss import kl_estimate


def shape_rewards(
    task_rewards_C: torch.Tensor, lengths_C: torch.Tensor, max_length: int, config: FilterConfig
) -> torch.Tensor:
    """float64 [C]: the task's rewards plus DAPO's soft overlong punishment (when on). Outcomes stay as they are."""
    rewards_C = torch.as_tensor(task_rewards_C).double()
    if config.overlong_cache_fraction == 0.0:
        return rewards_C
    cache_length = overlong_cache_length(max_length, config)
    return rewards_C + soft_overlong_punishment(lengths_C, max_length, cache_length).double()


def kl_penalised_rewards(
    rewards_C: torch.Tensor,
    logp_N: torch.Tensor,
    ref_logp_N: torch.Tensor,
    completion_index_N: torch.Tensor,
    mask_N: torch.Tensor | None = None,
    *,
    config: LossConfig,
) -> torch.Tensor:
    """float64 [C]: R - beta * sum over the completion's tokens of the KL estimate, when the penalty goes into the
    reward (``kl_in == "reward"``); else the rewards as they are. ``logp_N`` is the sampling policy's; no gradient.
    """
    rewards_C = torch.as_tensor(rewards_C).double()
    if config.kl_in != "reward" or config.kl_beta == 0.0:
        return rewards_C
    kl_N = kl_estimate(logp_N.detach().double(), ref_logp_N.detach().double(), config.kl_estimator)
    if mask_N is not None:
        kl_N = torch.where(mask_N.bool(), kl_N, 0.0)
    kl_C = torch.zeros_like(rewards_C).index_add(0, completion_index_N, kl_N)
    return rewards_C - config.kl_beta * kl_C
