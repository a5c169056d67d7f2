"""Other ways to explore under the same price: epsilon-greedy and UCB, to see what Thompson sampling contributes.

They share SAGC's posteriors, forgetting, dual step and fallback; only the choice differs. Plain Python: they are
yardsticks of the simulator.
"""

from __future__ import annotations

import math
from typing import Any

from sagc_fast.controller._twin import TwinCore, philox
from sagc_fast.controller.config import SAGCConfig
from sagc_fast.controller.sagc import SAGC
from sagc_fast.errors import ConfigError


class _EpsilonGreedyCore(TwinCore):
    epsilon = 0.1

    def _best_arm(self, step: int) -> int:
        arms = self._reachable_arms()
        word, pick, _, _ = philox((step & 0xFFFFFFFF, step >> 32, 0, 0), self.key)
        if self.state["is_fallback"]:
            return arms[0]
        if word / 2**32 < self.epsilon:
            return arms[pick * len(arms) >> 32]
        s = self.state
        means = {i: s["alpha"][i] / (s["alpha"][i] + s["beta"][i]) for i in arms}
        return max(arms, key=lambda i: self.config.utilities[i] - s["lambda"] * means[i])


class _UCBCore(TwinCore):
    width = 1.5

    def _best_arm(self, step: int) -> int:
        arms = self._reachable_arms()
        if self.state["is_fallback"]:
            return arms[0]
        return max(arms, key=self._optimistic_value)

    def _optimistic_value(self, arm: int) -> float:
        a, b = self.state["alpha"][arm], self.state["beta"][arm]
        mean, sd = a / (a + b), math.sqrt(a * b / ((a + b) * (a + b) * (a + b + 1.0)))
        return self.config.utilities[arm] - self.state["lambda"] * max(0.0, mean - self.width * sd)


class EpsilonGreedy(SAGC):
    """With probability ``epsilon`` any arm of the neighbourhood, else the best by posterior mean."""

    name = "epsilon-greedy"

    def __init__(self, config: SAGCConfig | None = None, seed: int = 0, epsilon: float = 0.1) -> None:
        if not 0.0 <= epsilon <= 1.0:
            raise ConfigError(f"EpsilonGreedy's epsilon is {epsilon!r}; it must be in [0, 1].")
        super().__init__(config, seed, backend="python")
        self._core = _EpsilonGreedyCore(self.config, seed)
        self._core.epsilon = epsilon


class UCB(SAGC):
    """The arm that would be best if its straggler rate were ``width`` posterior standard deviations below its mean."""

    name = "ucb"

    def __init__(self, config: SAGCConfig | None = None, seed: int = 0, width: float = 1.5) -> None:
        if not width >= 0.0:
            raise ConfigError(f"UCB's width is {width!r}; it must be >= 0.")
        super().__init__(config, seed, backend="python")
        self._core = _UCBCore(self.config, seed)
        self._core.width = width


def best_mixture(utilities: list[float], rates: list[float], delta: float) -> dict[str, Any]:
    """The oracle in hindsight: the mixture of at most two arms with the highest utility whose rate is <= delta.

    It knows every arm's true straggler rate, which no controller does. Where no arm is feasible it is the arm of the
    lowest rate. Returns {"weights", "utility", "rate", "is_feasible"}.
    """
    arms = range(len(rates))
    options = []
    for i in arms:
        if rates[i] <= delta:
            options.append((utilities[i], {i: 1.0}))
        for j in arms:
            if rates[i] <= delta < rates[j]:
                share = (delta - rates[i]) / (rates[j] - rates[i])
                options.append((utilities[i] * (1 - share) + utilities[j] * share, {i: 1 - share, j: share}))
    lowest = min(arms, key=lambda i: rates[i])
    utility, mixture = max(options, key=lambda option: option[0]) if options else (utilities[lowest], {lowest: 1.0})
    weights = [mixture.get(i, 0.0) for i in arms]
    return {
        "weights": weights,
        "utility": utility,
        "rate": sum(w * r for w, r in zip(weights, rates, strict=True)),
        "is_feasible": bool(options),
    }
