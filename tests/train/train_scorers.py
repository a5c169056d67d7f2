"""Scorers for the tests of the loop, imported by the scoring workers: nothing heavy here."""

from __future__ import annotations

from sagc_fast.tasks.base import Score


def digits(text: str, problem) -> Score:
    """Pays for the share of digits; correct when at least half: random policies get both outcomes."""
    share = sum(c.isdigit() for c in text) / max(1, len(text))
    return Score(share, share >= 0.5)


def constant(text: str, problem) -> Score:
    return Score(0.25, False)


def always_right(text: str, problem) -> Score:
    return Score(1.0, True)


def always_wrong(text: str, problem) -> Score:
    return Score(0.0, False)


def raises(text: str, problem) -> Score:
    raise ValueError("no reward today")


def slow(text: str, problem) -> Score:
    import time

    time.sleep(0.05)
    return digits(text, problem)


def by_id(text: str, problem) -> Score:
    """Problem 0 is hopeless, problem 1 solved, the others now and then."""
    if problem.problem_id < 2:
        return Score(float(problem.problem_id), problem.problem_id == 1)
    return Score(float(len(text)), len(text) % 2 == 0)
