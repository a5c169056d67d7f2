"""Scores completions by reasoning-gym's own scorers, inside a scoring worker.

A module of its own because it imports reasoning-gym (seconds), which belongs to a worker's start and not to the time
limit of its first completion.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym

from sagc_fast.tasks.answers import extract_answer, is_harmless_expression
from sagc_fast.tasks.base import Problem, Score

EVALUATED = frozenset(
    {
        "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
        "simple_integration", "spiral_matrix", "string_insertion",
    }
)  # fmt: skip
"""Generators whose scorer evaluates the answer as Python, or with sympy's parser, which does so too."""


def score_by_generator(
    completion: str, problem: Problem, *, extract: str, generator: str, params: Mapping[str, Any], partial_credit: bool
) -> Score:
    """Correct when the generator's scorer gives 1.0; the reward is 1.0 or 0.0, or its fraction with
    ``partial_credit``. An answer for a scorer that evaluates must be a harmless expression, else it is wrong."""
    answer = extract_answer(completion, extract)
    entry = problem.meta["entry"]
    if answer is None or (generator in EVALUATED and answer != entry["answer"] and not is_harmless_expression(answer)):
        return Score(0.0, False)
    try:
        value = float(_dataset(generator, pickle.dumps(dict(params))).score_answer(answer, entry))
    except MemoryError:
        raise
    except Exception:  # many of these scorers raise on text that they cannot parse: that is a wrong answer
        return Score(0.0, False)
    is_correct = value >= 1.0
    return Score(value if partial_credit else float(is_correct), is_correct)


@lru_cache(maxsize=1)
def _dataset(generator: str, params: bytes) -> Any:
    return reasoning_gym.create_dataset(generator, seed=0, size=1, **pickle.loads(params))
