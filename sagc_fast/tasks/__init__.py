"""Prompt sources and their scorers. Imports no torch; a source's own libraries are imported when it is made."""

from __future__ import annotations

from sagc_fast.tasks.base import Problem, Score, ScorerSpec, Task, make_task, tokenize_prompt

__all__ = ["Problem", "Score", "ScorerSpec", "Task", "make_task", "tokenize_prompt"]
