"""What a step costs: a decoding engine with continuous batching, and one that pads, plus the update.

A decode iteration costs ``iteration_seconds`` whatever its size (weights are read once) and ``row_seconds`` for every
row computed. Continuous batching computes the live rows only and refills free ones; padding computes every row of a
batch until its longest has ended. The defaults are ours and have the shape of a model of a few billion parameters on
one accelerator; measured values belong in their place (`sagc-fast simulate --iteration-ms ...`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields

import numpy as np

from sagc_fast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step from its lengths. All times in seconds; ``max_rows`` is the engine's batch limit."""

    iteration_seconds: float = 0.012
    row_seconds: float = 0.00004
    max_rows: int = 256
    update_token_seconds: float = 0.00006
    """Forward and backward of one trained token."""
    fixed_seconds: float = 1.0
    """Per step, whatever its size: weight sync, logging, scoring."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) >= (1 if item.name == "max_rows" else 0):
                raise ConfigError(f"Cost model: {item.name} is {getattr(self, item.name)!r}; it is too small.")

    def continuous_seconds(self, lengths_N: np.ndarray) -> float:
        """Rollout with continuous batching, completions in the given order (int64 [N])."""
        return self.iteration_seconds * self.num_iterations(lengths_N) + self.row_seconds * float(lengths_N.sum())

    def padded_seconds(self, lengths_N: np.ndarray) -> float:
        """Rollout in batches of ``max_rows``, each running all its rows to its longest completion."""
        total = 0.0
        for start in range(0, len(lengths_N), self.max_rows):
            batch = lengths_N[start : start + self.max_rows]
            total += float(batch.max()) * (self.iteration_seconds + self.row_seconds * len(batch))
        return total

    def num_iterations(self, lengths_N: np.ndarray) -> int:
        """Decode iterations until every completion has ended, a free row taking the next completion at once."""
        if len(lengths_N) <= self.max_rows:
            return int(lengths_N.max(initial=0))
        ends = lengths_N[: self.max_rows].tolist()
        heapq.heapify(ends)
        for length in lengths_N[self.max_rows :].tolist():
            heapq.heapreplace(ends, ends[0] + length)
        return int(max(ends))

    def other_seconds(self, num_tokens: int) -> float:
        """Everything but the rollout: the update on ``num_tokens`` output tokens and the fixed part."""
        return self.update_token_seconds * num_tokens + self.fixed_seconds


@dataclass(frozen=True, slots=True)
class Difficulties:
    """How solvable the prompts are: a prompt's success probability is Beta(``alpha``, ``beta``) distributed.

    Default ours: U-shaped, as many prompts of a training set are nearly always or nearly never solved.
    """

    alpha: float = 0.5
    beta: float = 0.5

    def informative_share(self, group_size: int) -> float:
        """Expected share of groups with both a right and a wrong answer: E[1 - p^G - (1 - p)^G].

        Only these move the policy under GRPO and DAPO; a closed form for a Beta distribution.
        """
        all_right = all_wrong = 1.0
        for i in range(group_size):
            all_right *= (self.alpha + i) / (self.alpha + self.beta + i)
            all_wrong *= (self.beta + i) / (self.alpha + self.beta + i)
        return 1.0 - all_right - all_wrong
