"""Cost-aware sizing: the most utility per predicted second, in place of the binary straggler event.

Beyond the paper. A straggler matters through the seconds it costs, and those can be predicted: a step of N = n G
completions with continuous batching runs about as many decode steps as its longest completion has tokens; drafts make
them fewer, too few rows more, by a factor r that the steps counted lately give. So

    seconds(G) = a + b r E[longest of n G] + c n G E[length]         utility(G) = n u(G)

Both expectations are order statistics of the lengths seen lately, taken from their empirical distribution (no family to
fit, so mixtures and caps are right): E[max of N] = sum_i x_(i) ((i/m)^N - ((i-1)/m)^N). The coefficients a, b, c are
fitted to measured step seconds. Neither tau nor delta is needed; the lengths seen at any G inform every G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

import numpy as np

from sagc_fast.controller._lengths import flatten
from sagc_fast.controller.config import SAGCConfig
from sagc_fast.controller.costs import Difficulties
from sagc_fast.controller.sagc import SAGC
from sagc_fast.errors import ConfigError

UTILITIES = ("log2", "informative")


@dataclass(frozen=True, slots=True)
class CostAwareConfig:
    """All values ours. Raises ConfigError."""

    candidates: tuple[int, ...] = (4, 8, 16)
    """Group sizes to choose from, strictly increasing integers >= 2."""
    utility: str = "log2"
    """u(G): "log2" (the paper's log2 G) or "informative", the expected share of groups with right and wrong answers."""
    hold: str = "prompts"
    """What the trainer keeps constant when G changes: "prompts", "completions" or "tokens"; predicts n for other G."""
    radius: int = 1
    """How many places of the candidate list one step may move."""
    window: int = 4096
    """Completions remembered: a few dozen steps."""
    forgetting: float = 0.98
    """Weight of an older step's seconds against the next one's in the fit of a, b, c."""
    fixed_seconds: float = 1.0
    """First guess of a, seconds per step; measured seconds replace it."""
    iteration_seconds: float = 0.012
    """First guess of b, seconds per decode iteration."""
    token_seconds: float = 0.0001
    """First guess of c, seconds per output token: its row in the engine and its share of the update."""
    tau: float = 2.0
    """Only for the reported straggler rate."""

    def __post_init__(self) -> None:
        checked = SAGCConfig(candidates=self.candidates, hold=self.hold, radius=self.radius, tau=self.tau)
        object.__setattr__(self, "candidates", checked.candidates)
        if self.utility not in UTILITIES:
            raise ConfigError(f"CostAwareConfig.utility is {self.utility!r}; it must be one of {UTILITIES}.")
        if not isinstance(self.window, Integral) or self.window < 1:
            raise ConfigError(f"CostAwareConfig.window is {self.window!r}; it must be a number of completions >= 1.")
        if not 0 < self.forgetting <= 1:
            raise ConfigError(f"CostAwareConfig.forgetting is {self.forgetting!r}; it must be in (0, 1].")
        for item in fields(self):
            if item.name.endswith("_seconds") and not 0 <= getattr(self, item.name) < math.inf:
                raise ConfigError(f"CostAwareConfig.{item.name} is {getattr(self, item.name)!r}; it must be >= 0.")


class CostAwareSAGC:
    """``decide`` / ``observe`` / ``state_dict`` / ``gauges`` as SAGC; ``observe`` takes the step's ``seconds`` too.

    Deterministic: every length teaches every arm, so there is nothing to explore.
    """

    name = "cost-aware"

    def __init__(self, config: CostAwareConfig | None = None, difficulties: Difficulties | None = None) -> None:
        self.config = config if config is not None else CostAwareConfig()
        difficulties = difficulties or Difficulties()
        self._utilities = [
            math.log2(size) if self.config.utility == "log2" else difficulties.informative_share(size)
            for size in self.config.candidates
        ]
        self._arm = 0
        self._lengths = np.empty(0)
        self._num_prompts = 0.0
        self._steps = self._longest = 0.0
        guess = [self.config.fixed_seconds, self.config.iteration_seconds, self.config.token_seconds]
        self._fit = SecondsFit(np.array(guess), self.config.forgetting)
        self._meter = SAGC(SAGCConfig(candidates=self.config.candidates[:1], tau=self.config.tau, fallback=False))

    def decide(self) -> int:
        """Group size of the next step. No side effect."""
        return self.config.candidates[self._arm]

    def observe(
        self,
        lengths: Sequence[Sequence[float]],
        *,
        num_clipped: int | None = None,
        problem_ids: Sequence[Any] | None = None,
        seconds: float | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Learn from one step: lengths per group (tokens), and where they were measured the seconds of the step and the
        decode steps of its rollout (else: as many as its longest completion has tokens)."""
        self._meter.observe(lengths, num_clipped=num_clipped)
        values, _, _ = flatten(lengths)
        if len(values) == 0:
            return
        self._lengths = np.concatenate([self._lengths, values])[-self.config.window :]
        self._num_prompts = float(len(lengths))
        if seconds is not None:
            steps, longest = float(values.max() if num_steps is None else num_steps), float(values.max())
            self._fit.add(np.array([1.0, steps, values.sum()]), float(seconds))
            forgetting = self.config.forgetting
            self._steps, self._longest = forgetting * self._steps + steps, forgetting * self._longest + longest
        low, high = self._arm - self.config.radius, self._arm + self.config.radius
        arms = range(max(0, low), min(len(self._utilities) - 1, high) + 1)
        values_by_arm = {i: self.utility_per_second(i) for i in arms}
        self._arm = max(arms, key=values_by_arm.__getitem__)

    def utility_per_second(self, arm: int) -> float:
        """Predicted utility of one step at this arm over its predicted seconds."""
        group_size = self.config.candidates[arm]
        num_prompts = self._num_prompts
        if self.config.hold != "prompts":
            num_prompts = max(1.0, num_prompts * self.decide() / group_size)
        return num_prompts * self._utilities[arm] / max(1e-9, self.predicted_seconds(num_prompts * group_size))

    def predicted_seconds(self, num_completions: float) -> float:
        """Expected seconds of a step of so many completions."""
        ordered = np.sort(self._lengths)
        below = np.linspace(0.0, 1.0, len(ordered) + 1) ** num_completions
        steps = float(ordered @ np.diff(below)) * (self._steps / self._longest if self._longest > 0.0 else 1.0)
        return float(self._fit.coefficients @ [1.0, steps, num_completions * ordered.mean()])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decisions depend on; survives JSON bit for bit."""
        return {
            "candidates": list(self.config.candidates),
            "arm": self._arm,
            "lengths": self._lengths.tolist(),
            "num_prompts": self._num_prompts,
            "steps": self._steps,
            "longest": self._longest,
            "fit": self._fit.state(),
            "meter": self._meter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; raises ConfigError for other candidates."""
        if state.get("candidates") != list(self.config.candidates) or "fit" not in state:
            raise ConfigError(
                f"The controller state is not one of CostAwareSAGC with candidates {list(self.config.candidates)}."
            )
        self._arm, self._num_prompts = int(state["arm"]), float(state["num_prompts"])
        self._lengths = np.array(state["lengths"], dtype=np.float64)
        self._steps, self._longest = float(state.get("steps", 0.0)), float(state.get("longest", 0.0))
        self._fit.restore(state["fit"])
        self._meter.load_state_dict(state["meter"])

    def gauges(self) -> dict[str, Any]:
        """The straggler statistics of SAGC's gauges, and the fitted cost of a step."""
        gauges = {k: v for k, v in self._meter.gauges().items() if k not in ("lambda", "arms", "is_fallback", "delta")}
        fixed, iteration, token = self._fit.coefficients.tolist()
        costs = {"fixed_seconds": fixed, "iteration_seconds": iteration, "token_seconds": token}
        return gauges | {"controller": self.name, "group_size": self.decide()} | costs


class SecondsFit:
    """Least squares for seconds = a + b steps + c tokens, forgetting old steps; a, b, c stay >= 0.

    The first guess counts as a small part of one observation, so that steps which are all alike, and so cannot tell the
    three apart, leave their proportions as guessed.
    """

    GUESS_WEIGHT = 0.002

    def __init__(self, guess: np.ndarray, forgetting: float) -> None:
        self._guess = guess
        self._forgetting = forgetting
        self._num_steps = 0.0
        self._gram = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self.coefficients = guess.copy()

    def add(self, features: np.ndarray, seconds: float) -> None:
        """One measured step: features (1, decode steps, tokens)."""
        if not 0.0 < seconds < math.inf:
            return
        self._num_steps = self._forgetting * self._num_steps + 1.0
        self._gram = self._forgetting * self._gram + np.outer(features, features) / seconds**2
        self._moment = self._forgetting * self._moment + features / seconds
        self._solve()

    def _solve(self) -> None:
        ridge = np.diag(self.GUESS_WEIGHT / self._num_steps * np.maximum(np.diag(self._gram), 1e-30))
        level = self._level()
        free = [0, 1, 2]
        solution = np.zeros(3)
        while free:  # drop what comes out negative: at most three rounds
            left = (self._gram + ridge)[np.ix_(free, free)]
            solution[:] = 0.0
            solution[free] = np.linalg.solve(left, (self._moment + ridge @ (level * self._guess))[free])
            if (solution >= 0.0).all():
                break
            free = [i for i in free if solution[i] > 0.0]
        self.coefficients = solution if solution.any() else level * self._guess

    def _level(self) -> float:
        """Factor that fits the guess as a whole to the measured seconds."""
        power = float(self._guess @ self._gram @ self._guess)
        return max(1e-6, float(self._guess @ self._moment) / power) if power > 0.0 else 1.0

    def state(self) -> dict[str, Any]:
        matrices = {"gram": self._gram, "moment": self._moment, "coefficients": self.coefficients}
        return {"num_steps": self._num_steps} | {name: values.tolist() for name, values in matrices.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self._num_steps = float(state["num_steps"])
        self._gram, self._moment = np.array(state["gram"]), np.array(state["moment"])
        self.coefficients = np.array(state["coefficients"])
