"""Problems in order, as token ids; those that the model has no room for are passed over, and said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sagc_fast.errors import DatasetError
from sagc_fast.tasks.base import Problem, Task, tokenize_prompt

logger = logging.getLogger(__name__)

MAX_UNUSABLE_IN_ROW = 1000
"""Unusable problems in a row after which the prompt source is given up (ours)."""


@dataclass
class Draw:
    """Problems ready for the engine, and where the next draw begins."""

    problems: list[Problem] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Index of each problem in its split's order: the prompt's part of the noise key."""
    next_position: int = 0
    num_passed_over: int = 0
    """Problems left out because the caller had no use for them now."""

    def part(self, places: Sequence[int]) -> Draw:
        """Some of the problems, by their places here."""
        lists = (self.problems, self.token_ids, self.positions)
        return Draw(*([values[i] for i in places] for values in lists), self.next_position)


class PromptSource:
    """A task's problems as the engine wants them.

    Args:
        max_prompt_tokens: longest prompt that leaves room for a completion.
    """

    def __init__(self, task: Task, tokenizer: Any, max_prompt_tokens: int) -> None:
        self._task, self._tokenizer, self._max_prompt_tokens = task, tokenizer, max_prompt_tokens
        self._has_told: set[str] = set()

    def draw(
        self,
        split: str,
        position: int,
        count: int,
        end: int | None = None,
        passes_over: Callable[[int], bool] = lambda problem_id: False,
        go_on: Callable[[], None] = lambda: None,
    ) -> Draw:
        """``count`` usable problems of ``split`` from ``position`` on (fewer when ``end`` comes first), without those
        whose id ``passes_over`` says yes to; it must not say so for ever. ``go_on`` is called at each; what it raises
        ends the draw.

        Raises DatasetError when too many in a row are unusable.
        """
        result = Draw(next_position=position)
        num_unusable = 0
        while len(result.problems) < count and (end is None or result.next_position < end):
            go_on()
            problem = self._task.problem(split, result.next_position)
            if passes_over(problem.problem_id):
                result.num_passed_over += 1
                result.next_position += 1
                continue
            tokens = tokenize_prompt(problem, self._tokenizer)
            if 0 < len(tokens) <= self._max_prompt_tokens:
                result.problems.append(problem)
                result.token_ids.append(tokens)
                result.positions.append(result.next_position)
                num_unusable = 0
            else:
                num_unusable += 1
                self._tell(split, problem, len(tokens), num_unusable)
            result.next_position += 1
        return result

    def _tell(self, split: str, problem: Problem, num_tokens: int, num_in_row: int) -> None:
        if num_in_row >= MAX_UNUSABLE_IN_ROW:
            raise DatasetError(
                f"{num_in_row} problems of the {split} split in a row have prompts that are empty or longer than "
                f"{self._max_prompt_tokens} tokens; shorten the prompts or use a model with a longer context."
            )
        if split not in self._has_told:
            self._has_told.add(split)
            logger.warning(
                "problem %d of the %s split has a prompt of %d tokens (1 to %d fit the model's context); such problems "
                "are passed over", problem.problem_id, split, num_tokens, self._max_prompt_tokens,
            )  # fmt: skip
