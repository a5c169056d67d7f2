"""What a trainer holds constant when the group size changes, and what that makes of prompts and gradients.

The paper does not say whether a smaller G means fewer completions per step or more prompts. It decides everything: with
prompts held, going from 16 to 4 removes three quarters of the tokens; with completions held it removes no tail at all.
"""

from __future__ import annotations

import math

from sagc_fast.errors import ConfigError

HOLDS = ("prompts", "completions", "tokens")
ADV_SCALES = ("none", "loo")


def num_prompts(hold: str, budget: float, group_size: int, mean_length: float | None = None) -> int:
    """Number of prompts of the next step, at least 1.

    ``budget`` is counted in the unit that ``hold`` names: prompts, completions or output tokens per step.
    ``mean_length`` (expected tokens of one completion) is needed for ``hold="tokens"`` only; taken from past steps, it
    keeps the number of prompts independent of the completions about to be drawn. Raises ConfigError.
    """
    if hold not in HOLDS:
        raise ConfigError(f"hold is {hold!r}; it must be one of {', '.join(map(repr, HOLDS))}.")
    if not (math.isfinite(budget) and budget > 0):
        raise ConfigError(f"The budget of hold={hold!r} is {budget!r}; it must be a number of {hold} > 0.")
    if hold == "prompts":
        return max(1, round(budget))
    if hold == "completions":
        return max(1, round(budget / group_size))
    if mean_length is None or not mean_length > 0:
        raise ConfigError("hold='tokens' has no completion length to plan with; pass mean_length for the first step.")
    return max(1, round(budget / (group_size * mean_length)))


def advantage_scale(adv_scale: str, group_size: int) -> float:
    """Factor on the advantages of a group of ``group_size``.

    A group mean that includes the sample itself shrinks the expected gradient by 1 - 1/G, so gradients of different G
    are of different size; ``"loo"`` undoes it with G / (G - 1), which equals a leave-one-out baseline.
    Raises ConfigError.
    """
    if adv_scale not in ADV_SCALES:
        raise ConfigError(f"adv_scale is {adv_scale!r}; it must be one of {', '.join(map(repr, ADV_SCALES))}.")
    return group_size / (group_size - 1) if adv_scale == "loo" else 1.0
