"""Scores completions of reasoning-gym problems inside a scoring worker.

reasoning-gym's own scorers pay part of a reward for an answer that merely contains the right one, and several evaluate
the model's text as Python. So: an answer is correct only at 1.0; where a problem has one right answer it is compared
here (and the library is not even imported); countdown and puzzle24 are checked by an arithmetic evaluator of our own.
The generators that are left go to reasoning_gym_own_scorer.py.
"""

from __future__ import annotations

from sagc_fast.tasks.answers import answers_equal, extract_answer, solves_countdown
from sagc_fast.tasks.base import Problem, Score

COUNTDOWN = frozenset({"countdown", "puzzle24"})
ONE_ANSWER = frozenset(
    {"binary_matrix", "chain_sum", "game_of_life_halting", "products", "spiral_matrix", "string_insertion"}
)
"""Generators whose own scorer adds nothing to one right answer but number formats, partial credit or (halting) a hole:
there any text that is not "True" counts as "False"."""

SCORERS = {
    "exact": "sagc_fast.tasks.reasoning_gym_scorer:score_exact",
    "countdown": "sagc_fast.tasks.reasoning_gym_scorer:score_countdown",
    "generator": "sagc_fast.tasks.reasoning_gym_own_scorer:score_by_generator",
}


def scoring_mode(generator: str, has_own_scorer: bool) -> str:
    """The key of :data:`SCORERS` that is sound for a generator."""
    if generator in COUNTDOWN:
        return "countdown"
    return "generator" if has_own_scorer and generator not in ONE_ANSWER else "exact"


def score_exact(completion: str, problem: Problem, *, extract: str) -> Score:
    """1.0 when the extracted answer is the reference answer (white space and number format aside), else 0.0."""
    answer = extract_answer(completion, extract)
    is_correct = answer is not None and answers_equal(answer, str(problem.answer))
    return Score(float(is_correct), is_correct)


def score_countdown(completion: str, problem: Problem, *, extract: str) -> Score:
    """1.0 for an expression that uses exactly the given numbers and equals the target, else 0.0."""
    answer = extract_answer(completion, extract)
    metadata = problem.meta["entry"]["metadata"]
    target = metadata.get("target", 24)  # puzzle24 has its target in its name alone
    is_correct = answer is not None and solves_countdown(answer, metadata["numbers"], target)
    return Score(float(is_correct), is_correct)
