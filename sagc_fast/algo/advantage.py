"""Advantages from the rewards of groups: segment reductions over group ids.

Groups may have any size of at least 2, different ones in the same batch, and stand in any order. Shape suffixes:
C completions of the batch, P groups (prompts).
"""

from __future__ import annotations

import torch

from sagc_fast.algo.config import AdvantageConfig
from sagc_fast.errors import ConfigError, RewardError
from sagc_fast.ops.rows import add_rows


def group_advantages(
    rewards_C: torch.Tensor,
    group_ids_C: torch.Tensor,
    *,
    scale: str = "std",
    eps: float = 1e-4,
    ddof: int = 1,
    adv_scale: str = "none",
    baseline: str = "mean",
    tolerance: float = 1e-6,
    valid_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advantage of every completion against its group.

    With n valid completions in the group, mean m and standard deviation s of their rewards R::

        centred   R - m                     baseline="mean"    (GRPO, arXiv:2402.03300, eq. 3)
                  R - mean of the others    baseline="loo"     (RLOO, arXiv:2402.14740; equals n/(n-1) (R - m))
        divided   by s + eps                scale="std"        (s with ``ddof``)
                  by S + eps                scale="batch"      (S: standard deviation, about 0, of all centred rewards)
                  by nothing                scale="none"       (Dr.GRPO, arXiv:2503.20783)
        times     n / (n - 1)               adv_scale="loo"    (ours)

    A group whose valid rewards span at most ``tolerance * max(1, max |R|)`` gets exactly 0, one with a single valid
    completion too.

    Args:
        rewards_C: float [C]. Values of invalid rows are ignored, NaN included.
        group_ids_C: int [C], any values; equal ids are one group.
        valid_C: bool [C], rows that take part; the others get 0 and do not count in any statistic. None: all.

    Returns:
        [C] in the dtype of ``rewards_C`` (float32 when that is not a floating type), computed in float64.

    Raises:
        ConfigError: a group of one completion, shapes that differ, or an option out of range.
        RewardError: a valid reward is NaN or infinite.
    """
    config = AdvantageConfig(baseline, scale, eps, ddof, adv_scale, tolerance)  # type: ignore[arg-type]
    if rewards_C.ndim != 1 or rewards_C.shape != group_ids_C.shape:
        raise ConfigError(
            f"rewards have shape {tuple(rewards_C.shape)} and group ids {tuple(group_ids_C.shape)}; "
            "both must be one flat list over completions."
        )
    _, group_C, sizes_P = torch.unique(group_ids_C, return_inverse=True, return_counts=True)
    if bool((sizes_P < 2).any()):
        lone = group_ids_C[sizes_P[group_C] < 2][0].item()
        raise ConfigError(f"Group {lone} has one completion; a group advantage needs a group size of at least 2.")
    if valid_C is None:
        valid_C = torch.ones_like(group_C, dtype=torch.bool)
    reward_C = torch.where(valid_C, rewards_C.double(), 0.0)
    if not bool(torch.isfinite(reward_C).all()):
        row = int((~torch.isfinite(reward_C)).nonzero()[0, 0])
        raise RewardError(
            f"The reward of completion {row} is {reward_C[row].item()}; mark it invalid or make it finite."
        )
    advantage_C = _scaled(reward_C, group_C, valid_C, len(sizes_P), config)
    return advantage_C.to(rewards_C.dtype if rewards_C.is_floating_point() else torch.float32)


def _scaled(
    reward_C: torch.Tensor, group_C: torch.Tensor, valid_C: torch.Tensor, num_groups: int, config: AdvantageConfig
) -> torch.Tensor:
    def group_sum(x_C: torch.Tensor) -> torch.Tensor:
        return add_rows(torch.where(valid_C, x_C, 0.0), group_C, num_groups)

    count_P = group_sum(torch.ones_like(reward_C))
    mean_C = (group_sum(reward_C) / count_P.clamp(min=1))[group_C]
    others_C = (count_P - 1).clamp(min=1)[group_C]
    to_loo_C = count_P[group_C] / others_C
    centred_C = reward_C - mean_C
    live_C = valid_C & has_spread(reward_C, group_C, valid_C, num_groups, config.tolerance)[group_C]

    advantage_C = centred_C * to_loo_C if config.baseline == "loo" else centred_C
    if config.scale == "std":
        variance_P = group_sum(centred_C.square()) / (count_P - config.ddof).clamp(min=1)
        advantage_C = advantage_C / (variance_P.sqrt()[group_C] + config.eps)
    elif config.scale == "batch":
        squares = torch.where(valid_C, advantage_C.square(), 0.0).sum()
        variance = squares / (valid_C.sum() - config.ddof).clamp(min=1)
        advantage_C = advantage_C / (variance.sqrt() + config.eps)
    if config.adv_scale == "loo":
        advantage_C = advantage_C * to_loo_C
    return torch.where(live_C, advantage_C, 0.0)


def has_spread(
    reward_C: torch.Tensor, group_C: torch.Tensor, valid_C: torch.Tensor, num_groups: int, tolerance: float
) -> torch.Tensor:
    """bool [P]: groups (ids 0 .. P-1 in ``group_C``) whose valid rewards span more than
    ``tolerance * max(1, largest magnitude)``."""

    def extreme(x_C: torch.Tensor, fill: float, reduce: str) -> torch.Tensor:
        filled_C = torch.where(valid_C, x_C, fill)
        return filled_C.new_full((num_groups,), fill).scatter_reduce(0, group_C, filled_C, reduce)

    high_P = extreme(reward_C, -torch.inf, "amax")
    low_P = extreme(reward_C, torch.inf, "amin")
    magnitude_P = extreme(reward_C.abs(), 1.0, "amax").clamp(min=1.0)
    return high_P - low_P > tolerance * magnitude_P
