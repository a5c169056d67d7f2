"""What one more token in a step costs, compared with the step itself; fixed, or learnt from the seconds of steps."""

from __future__ import annotations

import math

HOST_SECONDS, HOST_SECONDS_IN_BURSTS = 300e-6, 10e-6
"""Per step, of the roofline estimate (as the next three; measured on an AMD EPYC, Zen 4, docs/rollout.md): where each
step has a plan of its own, and where native code does many."""
HOST_SECONDS_PER_TOKEN = 5e-6
BYTES_PER_SECOND = 15e9
OPERATIONS_PER_SECOND = 80e9
LEAST_FIXED_TOKENS, MOST_FIXED_TOKENS = 0.5, 512.0
MOST_TOKENS = 64
"""Larger steps say nothing about the few rows of a tail: their products are bound by arithmetic."""
KEPT = 0.995
"""Weight of the steps so far when another is added: some two hundred count (ours)."""
PRIOR_WEIGHT = 7e5
"""Trust in the first estimate: a sum of squared deviations of squared token counts that the steps seen have to outweigh
(ours): two hundred steps of 10 +- 3 tokens."""
MOST_SURPRISE = 1.5
"""A step counts with at most so many times its expected seconds (ours): the machine interrupts now and then."""


DRAFT_SECONDS, DRAFT_SECONDS_PER_ROW = 200e-6, 15e-6
"""Host's work for drafts, first estimate (measured on the same machine): look-ups, a plan that is no burst."""
PLAN_SECONDS = 1.2e-3
"""Of a plan that cuts a burst of native steps, which have swept what the host works with out of the caches (measured on
the same machine: 1.4 to 1.9 ms of the CPU on a model of 8M parameters; 0.3 ms where plans follow each other)."""
DRAFT_WEIGHT = 0.05
"""Weight of the newest step with drafts in the estimate of that work (ours)."""


class StepCost:
    """A step of ``n`` tokens is taken to cost ``sqrt(a^2 + (b n)^2)`` seconds; ``fixed_tokens = a / b`` decides.

    ``a`` reads the weights, ``b`` is a token's arithmetic. The two overlap, so that a few tokens more cost next to
    nothing and many cost their arithmetic (measured: docs/rollout.md). Squares make it a straight line in ``n^2``:
    least squares over recent steps, newer ones weighing more, pulled towards ``prior_fixed_tokens`` as long as the
    steps differ too little in size to tell ``a`` from ``b``. With ``is_learnt=False`` the ratio stays there, so that
    nothing that is decided by it depends on a clock.
    """

    def __init__(self, prior_fixed_tokens: float, is_learnt: bool = True) -> None:
        self.is_learnt = is_learnt
        self.fixed_tokens = prior_fixed_tokens
        self._prior = prior_fixed_tokens
        self.seconds_per_token = 0.0
        """Of large steps; 0 until a step has been observed."""
        self._draft_factor = 1.0
        self._weight = self._sizes = self._costs = 0.0
        self._squares = self._products = 0.0

    def seconds(self, num_tokens: float) -> float:
        """Expected seconds of a step; 0 until one has been observed."""
        return self.seconds_per_token * math.hypot(self.fixed_tokens, num_tokens)

    def draft_seconds(self, num_rows: int) -> float:
        """Expected work of the host for drafts in a step with so many rows, beyond what its tokens cost."""
        return self._draft_factor * (DRAFT_SECONDS + DRAFT_SECONDS_PER_ROW * num_rows)

    def observe_drafts(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Learn from a step with drafts what they cost the host."""
        if not (self.is_learnt and self.seconds_per_token and num_tokens <= MOST_TOKENS):
            return
        estimate = DRAFT_SECONDS + DRAFT_SECONDS_PER_ROW * num_rows
        factor = min(max((seconds - self.seconds(num_tokens)) / estimate, 0.0), 2 * MOST_SURPRISE * self._draft_factor)
        self._draft_factor = max(0.1, self._draft_factor + DRAFT_WEIGHT * (factor - self._draft_factor))

    def observe(self, num_tokens: int, seconds: float, num_steps: int = 1) -> None:
        """Learn from ``num_steps`` steps of ``num_tokens`` tokens that took ``seconds`` each."""
        if not 0 < num_tokens <= MOST_TOKENS:
            return
        if self.seconds_per_token:
            seconds = min(seconds, MOST_SURPRISE * self.seconds(num_tokens))
        size, cost = float(num_tokens * num_tokens), seconds * seconds
        kept = KEPT**num_steps
        weight = (1.0 - kept) / (1.0 - KEPT)  # of all these steps: 1 + KEPT + KEPT^2 + ...
        self._weight = self._weight * kept + weight
        self._sizes = self._sizes * kept + weight * size
        self._costs = self._costs * kept + weight * cost
        self._squares = self._squares * kept + weight * size * size
        self._products = self._products * kept + weight * size * cost
        mean_size, mean_cost = self._sizes / self._weight, self._costs / self._weight
        expected_slope = mean_cost / (self._prior**2 + mean_size)
        if not self.is_learnt:
            self.seconds_per_token = math.sqrt(expected_slope)
            return
        deviations = self._squares - self._sizes * mean_size
        covariance = self._products - self._sizes * mean_cost
        slope = (covariance + PRIOR_WEIGHT * expected_slope) / (deviations + PRIOR_WEIGHT)
        least = mean_cost / (MOST_FIXED_TOKENS**2 + mean_size)
        most = mean_cost / (LEAST_FIXED_TOKENS**2 + mean_size)
        slope = min(max(slope, least), most)
        self.seconds_per_token = math.sqrt(slope)
        self.fixed_tokens = math.sqrt(max(mean_cost / slope - mean_size, LEAST_FIXED_TOKENS**2))


def roofline(num_parameters: int, num_bytes: int, has_bursts: bool = False) -> tuple[float, float]:
    """``a / b`` and ``a`` of a model from its size: a step reads the weights once, a token multiplies with each."""
    step_seconds = (HOST_SECONDS_IN_BURSTS if has_bursts else HOST_SECONDS) + num_bytes / BYTES_PER_SECOND
    token_seconds = HOST_SECONDS_PER_TOKEN + 2 * num_parameters / OPERATIONS_PER_SECOND
    return step_seconds / token_seconds, step_seconds


def plan_seconds(has_bursts: bool) -> float:
    """What a plan adds to its steps where native code would have taken them among others; 0 where each has its own."""
    return PLAN_SECONDS if has_bursts else 0.0
