"""Scores a mathematical answer by math-verify, inside a scoring worker.

math-verify stops its own runaway computations by ``signal.alarm``, which works in a main thread only: a worker's scorer
runs there. Imported when the worker starts, so that the import (seconds) is in no completion's time limit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from sagc_fast.tasks.answers import after_hashes, answers_equal, are_integers, extract_answer, last_boxed
from sagc_fast.tasks.base import Problem, Score

VERIFY_SECONDS = 2
"""Limit of one parsing or comparison; past it the answer counts as not equal, without a scorer error."""


def score_math(completion: str, problem: Problem, *, extract: str = "auto") -> Score:
    """1.0 when the completion's answer equals ``problem.answer`` mathematically, else 0.0.

    ``auto`` takes the last ``\\boxed{}``, else what follows the last ``####``, else what math-verify finds in the text
    (its last formula or number).
    """
    gold = str(problem.answer)
    if extract == "auto":
        answer = last_boxed(completion) or after_hashes(completion)
        text = completion if answer is None else answer
    else:
        answer = text = extract_answer(completion, extract)
    if text is None or not text.strip():
        return Score(0.0, False)
    if answer is not None and (answers_equal(answer, gold) or are_integers(answer, gold)):
        is_correct = answers_equal(answer, gold)
        return Score(float(is_correct), is_correct)
    given = list(_parsed_answer(answer)) if answer is not None else parse(text, parsing_timeout=VERIFY_SECONDS)
    reference = list(_parsed_answer(gold))
    is_correct = bool(given) and bool(reference) and verify(reference, given, timeout_seconds=VERIFY_SECONDS)
    return Score(float(is_correct), is_correct)


@lru_cache(maxsize=64)
def _parsed_answer(answer: str) -> tuple[Any, ...]:
    """A bare answer, as text or LaTeX without its delimiters."""
    return tuple(parse(f"\\boxed{{{answer}}}", parsing_timeout=VERIFY_SECONDS))
