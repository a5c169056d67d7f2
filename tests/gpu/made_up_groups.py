"""Scored groups with made-up tokens and rewards, for tests of updates."""

from __future__ import annotations

from sagc_fast.tasks.base import Problem, Score
from sagc_fast.train.sampling import ScoredGroup
from sagc_fast.types import Completion, Group


def made_up_groups(prompts: list[list[int]], num_completions: int, growth: int) -> list[ScoredGroup]:
    """Completion i has ``2 + growth * i`` tokens; one of a group is right."""
    groups = []
    for index, prompt in enumerate(prompts):
        lengths = [2 + growth * i for i in range(num_completions)]
        completions = [
            Completion(i, [(7 * i + 3 * j + index) % 250 for j in range(n)], [-5.5] * n, "stop")
            for i, n in enumerate(lengths)
        ]
        scores = [Score(float(i == index), i == index) for i in range(num_completions)]
        groups.append(ScoredGroup(Group(index, prompt, completions, prompt_id=index), Problem(prompt=""), scores))
    return groups
