"""How many prompts a step draws when the group size changes: constant prompts, completions or tokens per step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sagc_fast.controller.hold import num_prompts

NEWEST_WEIGHT = 0.1
"""Weight of the newest step in the expected completion length (ours): about the last ten steps."""


class PromptBudget:
    """Plans with the lengths of past steps alone, so that no step's size depends on the completions it draws.

    Args:
        hold: ``prompts``, ``completions`` or ``tokens`` (see ``controller.hold`` in the configuration).
        prompts: prompts of a step at the largest group size.
        max_group_size: the largest group size that can be chosen.
        state: from :meth:`state_dict`.
    """

    def __init__(self, hold: str, prompts: int, max_group_size: int, state: Mapping[str, Any] | None = None) -> None:
        self._hold = hold
        self._prompts = prompts
        self._completions = prompts * max_group_size
        state = state or {}
        self._first_length: float | None = state.get("first_length")
        self._mean_length: float | None = state.get("mean_length")

    def num_prompts(self, group_size: int) -> int:
        """Prompts of the next step, at least 1. The first step of ``tokens`` is sized as ``completions``."""
        if self._hold == "prompts":
            return num_prompts("prompts", self._prompts, group_size)
        if self._hold == "completions" or self._first_length is None:
            return num_prompts("completions", self._completions, group_size)
        tokens = self._completions * self._first_length
        return num_prompts("tokens", tokens, group_size, self._mean_length)

    def observe(self, lengths: Sequence[Sequence[int]]) -> None:
        """Completion lengths in tokens of a finished step, one sequence per group."""
        mean = statistics.fmean(n for group in lengths for n in group)
        self._first_length = self._first_length or mean
        old = self._mean_length
        self._mean_length = mean if old is None else old + NEWEST_WEIGHT * (mean - old)

    def state_dict(self) -> dict[str, Any]:
        return {"first_length": self._first_length, "mean_length": self._mean_length}
