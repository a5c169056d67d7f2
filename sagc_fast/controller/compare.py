"""Policies by name, and their comparison on one length process under every reading of "held constant"."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sagc_fast.controller.baselines import FixedG
from sagc_fast.controller.config import ControllerWarning, SAGCConfig
from sagc_fast.controller.cost_aware import CostAwareConfig, CostAwareSAGC
from sagc_fast.controller.explorers import UCB, EpsilonGreedy, best_mixture
from sagc_fast.controller.processes import Trace
from sagc_fast.controller.prompt_aware import PromptAwareSAGC
from sagc_fast.controller.sagc import SAGC
from sagc_fast.controller.simulate import (
    Policy,
    RunRecord,
    Scenario,
    run_policy,
    straggler_probabilities,
    summarise,
)
from sagc_fast.errors import ConfigError

PAPER_ETA = 0.1
"""The dual step of the plain rule in comparisons; the paper gives no value, 0.1 is the textbook's small step (ours)."""

RATE_MOMENTS, RATE_GROUPS, MIN_RATE_GROUPS = 8, 32_000, 100
"""Of the estimate of a process's straggler rates: moments of the run and groups drawn over all of them, but never fewer
than the last at one. A trace is asked at every recorded step, since a few steps may hold most of its stragglers."""

DEFAULT_POLICIES = (
    "fixed-2",
    "fixed-4",
    "fixed-8",
    "fixed-16",
    "sagc",
    "sagc-plain",
    "sagc-fair",
    "prompt-aware",
    "cost-aware",
    "epsilon-greedy",
    "ucb",
    "oracle",
)


class HindsightMixture:
    """Plays given shares of the candidates in the evenest order: the oracle's static mixture."""

    def __init__(self, candidates: Sequence[int], weights: Sequence[float]) -> None:
        self._candidates, self._weights = tuple(candidates), np.array(weights, dtype=np.float64)
        self._owed = self._weights.copy()

    def decide(self) -> int:
        return self._candidates[int(np.argmax(self._owed))]

    def observe(self, lengths: Any, **_: Any) -> None:
        self._owed[int(np.argmax(self._owed))] -= 1.0
        self._owed += self._weights

    def gauges(self) -> dict[str, Any]:
        return {"controller": "oracle", "group_size": self.decide()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything ``compare`` found."""

    rates: dict[int, float]
    """True straggler probability of every candidate, averaged over the run."""
    oracle: dict[str, Any]
    """The best feasible mixture of the candidates (``best_mixture``)."""
    rows: dict[str, list[dict[str, Any]]]
    """Summaries by hold, one per policy."""
    records: dict[str, dict[str, RunRecord]]
    """Step-by-step records by hold and policy."""
    notes: list[str]
    """What the controllers warned about, each with the policy, what was held and the step."""


def make_policy(name: str, config: SAGCConfig, scenario: Scenario, mixture: Sequence[float]) -> Policy:
    """A policy by its name (DEFAULT_POLICIES, or fixed-G for any G >= 2). Raises ConfigError for an unknown name."""
    seed = scenario.seed
    makers: dict[str, Callable[[], Policy]] = {
        "sagc": lambda: SAGC(config, seed),
        "sagc-plain": lambda: SAGC(replace(config, eta=PAPER_ETA, fallback=False), seed),
        "sagc-fair": lambda: SAGC(replace(config, ratio="reference"), seed),
        "prompt-aware": lambda: PromptAwareSAGC(config, seed),
        "cost-aware": lambda: CostAwareSAGC(
            CostAwareConfig(candidates=config.candidates, hold=scenario.hold, utility="informative"),
            scenario.difficulties,
        ),
        "epsilon-greedy": lambda: EpsilonGreedy(config, seed),
        "ucb": lambda: UCB(config, seed),
        "oracle": lambda: HindsightMixture(config.candidates, mixture),
    }
    kind, _, size = name.partition("-")
    if kind == "fixed" and size.isdigit():
        return FixedG(int(size), tau=config.tau)
    if name not in makers:
        raise ConfigError(f"Policy {name!r} is unknown; choose from fixed-G, {', '.join(makers)}.")
    return makers[name]()


def compare(
    config: SAGCConfig,
    scenario: Scenario,
    policies: Sequence[str] = DEFAULT_POLICIES,
    holds: Sequence[str] = ("prompts", "completions", "tokens"),
    progress: Callable[[str, str, int], None] | None = None,
) -> Comparison:
    """Run every policy under every hold. ``progress(hold, policy, steps_done)``. Raises ConfigError."""
    moments = len(scenario.process.steps) if isinstance(scenario.process, Trace) else RATE_MOMENTS
    groups = max(MIN_RATE_GROUPS, RATE_GROUPS // moments)
    table = straggler_probabilities(scenario.process, config.candidates, config.tau, moments, groups)
    rates = table.mean(axis=0).tolist()
    oracle = best_mixture(list(config.utilities), rates, config.delta)
    for name in policies:
        make_policy(name, config, scenario, oracle["weights"])  # an unknown name fails before an hour of work
    rows: dict[str, list[dict[str, Any]]] = {}
    records: dict[str, dict[str, RunRecord]] = {}
    notes: list[str] = []
    for hold in holds:
        held = replace(scenario, hold=hold)
        records[hold] = {}
        for name in policies:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ControllerWarning)
                policy = make_policy(name, config, held, oracle["weights"])
                steps_of_notes: list[int] = []

                def step_done(done: int, hold=hold, name=name, caught=caught, said=steps_of_notes) -> None:
                    said += [done] * (len(caught) - len(said))
                    if progress is not None:
                        progress(hold, name, done)

                step_done(0)  # what the configuration itself warns of
                records[hold][name] = run_policy(name, policy, held, step_done)
            notes += [
                f"{name} with {hold} held, {f'at step {step}' if step else 'from the start'}: {warning.message}"
                for step, warning in zip(steps_of_notes, caught, strict=True)
                if warning.category is ControllerWarning
            ]
        wall = min(float(record.continuous_seconds.sum()) for record in records[hold].values())
        rows[hold] = [summarise(record, wall) for record in records[hold].values()]
    return Comparison(dict(zip(config.candidates, rates, strict=True)), oracle, rows, records, notes)


def static_frontier(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """(seconds, informative groups) per step of the fixed sizes, by seconds: the line any controller must beat.

    Alternating between two fixed sizes reaches every point of a straight line between theirs.
    """
    points = [
        (row["step_seconds"], row["informative_groups_per_step"])
        for row in rows
        if row["policy"].startswith("fixed-") and math.isfinite(row["step_seconds"])
    ]
    return sorted(points)
