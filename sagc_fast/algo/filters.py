"""Which groups and completions take part in an update, and the price of length.

Shape suffixes: C completions of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sagc_fast.algo.config import FilterConfig
from sagc_fast.errors import ConfigError


def has_signal(outcomes: Sequence[bool]) -> bool:
    """Dynamic sampling's decision on one group (DAPO, arXiv:2503.14476, eq. 11): 0 < number correct < G.

    Decided on the outcome, never on a shaped reward: an overlong punishment must not let a hopeless group in.
    """
    return 0 < sum(map(bool, outcomes)) < len(outcomes)


def dynamic_sampling_mask(
    outcomes_C: torch.Tensor, group_ids_C: torch.Tensor, valid_C: torch.Tensor | None = None
) -> torch.Tensor:
    """bool [C]: True for every completion of a group with 0 < number correct < number of completions.

    Args:
        outcomes_C: bool [C], correct or not.
        group_ids_C: int [C], any values; groups may have different sizes.
        valid_C: bool [C], completions that count; a group is judged by these alone. None: all.
    """
    if outcomes_C.dtype != torch.bool:
        raise ConfigError(f"Outcomes are {outcomes_C.dtype}; dynamic sampling judges by bool outcomes, not by rewards.")
    valid_C = torch.ones_like(outcomes_C) if valid_C is None else valid_C.bool()
    ids_P, group_C = torch.unique(group_ids_C, return_inverse=True)
    zeros_P = torch.zeros(len(ids_P), dtype=torch.int64, device=outcomes_C.device)
    correct_P = zeros_P.index_add(0, group_C, (outcomes_C & valid_C).long())
    counted_P = zeros_P.index_add(0, group_C, valid_C.long())
    return ((correct_P > 0) & (correct_P < counted_P))[group_C]


def refill_size(
    num_wanted: int, num_kept: int, num_sampled: int, seconds: float, round_size: int, config: FilterConfig
) -> int:
    """How many more prompts to draw in this step; 0 means go on with the groups that are kept.

    Bounded twice, so a step always ends: by ``max_refill_factor`` times ``num_wanted`` prompts and by
    ``max_refill_seconds``. The size follows the share of groups kept so far, at most ``round_size`` at a time.

    Args:
        num_wanted: groups the step would like; num_kept: groups kept so far; num_sampled: prompts drawn so far.
        seconds: since the step's rollout began.
    """
    missing = num_wanted - num_kept
    left = math.floor(num_wanted * config.max_refill_factor) - num_sampled
    if not config.dynamic_sampling or missing <= 0 or left <= 0 or seconds >= config.max_refill_seconds:
        return 0
    if num_kept == 0:
        return min(round_size, left)
    return min(math.ceil(missing * num_sampled / num_kept), round_size, left)


def overlong_cache_length(max_length: int, config: FilterConfig) -> int:
    """L_cache in tokens for a length cap of ``max_length`` tokens."""
    return round(max_length * config.overlong_cache_fraction)


def soft_overlong_punishment(lengths_C: torch.Tensor, max_length: int, cache_length: int) -> torch.Tensor:
    """float32 [C] in [-1, 0], to be added to the rewards (DAPO, arXiv:2503.14476, eq. 13): 0 up to
    ``max_length - cache_length`` tokens, linear down to -1 at ``max_length``, -1 beyond. Exact at both edges.

    With ``cache_length`` 0 there is no slope: 0 up to ``max_length``, -1 beyond.

    Raises ConfigError unless 0 <= cache_length <= max_length.
    """
    if not 0 <= cache_length <= max_length:
        raise ConfigError(
            f"The overlong cache is {cache_length} tokens; it must lie between 0 and the length cap of {max_length}."
        )
    lengths_C = torch.as_tensor(lengths_C)
    if cache_length == 0:
        return 0.0 - (lengths_C > max_length).float()
    excess_C = (lengths_C - (max_length - cache_length)).clamp(0, cache_length)
    return (0.0 - excess_C.double() / cache_length).float()


def truncation_mask(is_truncated_C: torch.Tensor, config: FilterConfig) -> torch.Tensor:
    """bool [C]: completions that take part; those cut at the length cap do not when ``mask_truncated`` is set."""
    is_truncated_C = torch.as_tensor(is_truncated_C, dtype=torch.bool)
    return ~is_truncated_C if config.mask_truncated else torch.ones_like(is_truncated_C)
