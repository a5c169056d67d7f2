"""What one more token in a step costs, compared with the step itself; fixed, or learnt from the seconds of steps."""

from __future__ import annotations

HOST_SECONDS = 300e-6
"""Per step, of the roofline estimate (as the next four; measured on an AMD EPYC, Zen 4, docs/rollout.md)."""
HOST_SECONDS_PER_TOKEN = 5e-6
BYTES_PER_SECOND = 15e9
OPERATIONS_PER_SECOND = 80e9
LEAST_FIXED_TOKENS, MOST_FIXED_TOKENS = 0.5, 512.0
MOST_TOKENS = 64
"""Larger steps say nothing about the few rows of a tail: their products are bound by arithmetic."""
KEPT = 0.995
"""Weight of the steps so far when another is added: some two hundred count (ours)."""
PRIOR_WEIGHT = 2000.0
"""Trust in the first estimate: a sum of squared deviations, in tokens, that the steps seen have to outweigh (ours)."""
MOST_SURPRISE = 1.5
"""A step counts with at most so many times its expected seconds (ours): the machine interrupts now and then."""


class StepCost:
    """A step of ``n`` tokens is taken to cost ``a + b n`` seconds; what decides is ``fixed_tokens = a / b``.

    Least squares over recent steps, newer ones weighing more, and pulled towards ``prior_fixed_tokens`` as long as the
    steps differ too little in size to tell ``a`` from ``b``. With ``is_learnt=False`` the ratio stays there, so that
    nothing that is decided by it depends on a clock.
    """

    def __init__(self, prior_fixed_tokens: float, is_learnt: bool = True) -> None:
        self.is_learnt = is_learnt
        self.fixed_tokens = prior_fixed_tokens
        self._prior = prior_fixed_tokens
        self.seconds_per_token = 0.0
        """0 until a step has been observed."""
        self._weight = self._tokens = self._seconds = 0.0
        self._squares = self._products = 0.0

    def seconds(self, num_tokens: float) -> float:
        """Expected seconds of a step; 0 until one has been observed."""
        return self.seconds_per_token * (self.fixed_tokens + num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step of ``num_tokens`` tokens."""
        if not 0 < num_tokens <= MOST_TOKENS:
            return
        if self.seconds_per_token:
            seconds = min(seconds, MOST_SURPRISE * self.seconds(num_tokens))
        self._weight = self._weight * KEPT + 1.0
        self._tokens = self._tokens * KEPT + num_tokens
        self._seconds = self._seconds * KEPT + seconds
        self._squares = self._squares * KEPT + num_tokens * num_tokens
        self._products = self._products * KEPT + num_tokens * seconds
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        expected_slope = mean_seconds / (self._prior + mean_tokens)
        if not self.is_learnt:
            self.seconds_per_token = expected_slope
            return
        deviations = self._squares - self._tokens * mean_tokens
        covariance = self._products - self._tokens * mean_seconds
        slope = (covariance + PRIOR_WEIGHT * expected_slope) / (deviations + PRIOR_WEIGHT)
        least = mean_seconds / (MOST_FIXED_TOKENS + mean_tokens)
        most = mean_seconds / (LEAST_FIXED_TOKENS + mean_tokens)
        self.seconds_per_token = min(max(slope, least), most)
        self.fixed_tokens = mean_seconds / self.seconds_per_token - mean_tokens


def roofline_fixed_tokens(num_parameters: int, num_bytes: int) -> float:
    """``a / b`` of a model from its size alone: a step reads the weights once, a token multiplies with each of them."""
    step = HOST_SECONDS + num_bytes / BYTES_PER_SECOND
    token = HOST_SECONDS_PER_TOKEN + 2 * num_parameters / OPERATIONS_PER_SECOND
    return step / token
