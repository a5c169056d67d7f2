"""Scores a completion by comparing its answer with the reference as text or number, inside a scoring worker."""

from __future__ import annotations

from sagc_fast.tasks.answers import after_hashes, answers_equal, extract_answer, last_boxed, last_line
from sagc_fast.tasks.base import Problem, Score


def score_text(completion: str, problem: Problem, *, extract: str = "auto") -> Score:
    """1.0 when the extracted answer equals ``problem.answer``, white space and number format aside, else 0.0."""
    if extract == "auto":
        answer = last_boxed(completion) or after_hashes(completion) or last_line(completion)
    else:
        answer = extract_answer(completion, extract)
    is_correct = answer is not None and answers_equal(answer, problem.answer)
    return Score(float(is_correct), is_correct)
