"""The rollout workload: groups of completions with forced, heavy-tailed lengths. Standard library only.

Lengths are forced (no engine may stop early or late), so every engine does the same useful work whatever its weights
say; ids of prompts are random. Tokens are drawn at temperature 1 over the full vocabulary.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from sagc_fast.errors import ConfigError

FIRST_ID, END_ID = 4, 4096
"""Prompt ids come from [FIRST_ID, END_ID): no special token of the models at hand."""
MAX_COUNT = 100_000
"""Of prompts, of completions per prompt and of tokens: more is a slip, and would fill the memory with its ids."""
STRIDE = 997
"""Ids of run r are those of run 0 moved by r times this (coprime to the range), so that no prefix cache helps twice."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lognormal completion lengths, cut to [min_length, max_length]; prompt lengths uniform. All in tokens."""

    num_prompts: int = 8
    group_size: int = 16
    mean_length: float = 64.0
    """Of the lognormal before it is cut; the default's 128 completions come to 63.4."""
    max_length: int = 256
    sigma: float = 0.9
    min_length: int = 8
    min_prompt: int = 64
    max_prompt: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        most = MAX_COUNT
        checks = (
            (1 <= self.num_prompts <= most, "number of prompts", self.num_prompts),
            (1 <= self.group_size <= most, "group size", self.group_size),
            (1 <= self.min_length <= self.max_length <= most, "longest completion", self.max_length),
            (0 < self.mean_length <= self.max_length, "mean completion length", self.mean_length),
            (1 <= self.min_prompt <= self.max_prompt, "longest prompt", self.max_prompt),
        )
        for is_right, name, value in checks:
            if not is_right:
                raise ConfigError(
                    f"The workload's {name} is {value}; counts are at least 1, the longest completion at least "
                    f"{self.min_length} and the mean, the longest prompt at least {self.min_prompt}, all at most "
                    f"{most:,}."
                )

    def prompts(self, run: int = 0) -> list[list[int]]:
        """Token ids; the same lengths in every run, other ids."""
        span = END_ID - FIRST_ID
        return [[FIRST_ID + (i - FIRST_ID + STRIDE * run) % span for i in ids] for ids in self._draw()[0]]

    def lengths(self) -> list[list[int]]:
        """Forced completion lengths, one list per prompt."""
        return self._draw()[1]

    def describe(self) -> dict[str, Any]:
        """The parameters and what they amount to."""
        prompts, lengths = self._draw()
        flat = [length for group in lengths for length in group]
        unique = sum(map(len, prompts))
        return {
            **asdict(self),
            "completions": len(flat),
            "output_tokens": sum(flat),
            "unique_prompt_tokens": unique,
            "repeated_prompt_tokens": unique * self.group_size,
            "lock_step_idle": round(1 - sum(flat) / (len(flat) * max(flat)), 4),
        }

    def live_rows(self) -> list[int]:
        """Rows of each step when all start together and leave at their end: what no engine can do without."""
        flat = [length for group in self.lengths() for length in group]
        return [sum(length > step for length in flat) for step in range(max(flat))]

    def _draw(self) -> tuple[list[list[int]], list[list[int]]]:
        draw = random.Random(1000 + self.seed)
        prompts = [
            [draw.randrange(FIRST_ID, END_ID) for _ in range(draw.randint(self.min_prompt, self.max_prompt))]
            for _ in range(self.num_prompts)
        ]
        mu = math.log(self.mean_length) - self.sigma**2 / 2

        def length() -> int:
            return max(self.min_length, min(self.max_length, round(draw.lognormvariate(mu, self.sigma))))

        return prompts, [[length() for _ in range(self.group_size)] for _ in range(self.num_prompts)]
