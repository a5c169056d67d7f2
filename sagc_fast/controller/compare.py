"""Policies by name, and their comparison on one length process under every reading of "held constant"."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sagc_fast.controller.baselines import FixedG
from sagc_fast.controller.config import ControllerWarning, DeltaOutOfReachWarning, SAGCConfig
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
    """What the controllers warned about, each matter once, with every policy, hold and step that it concerns."""


@dataclass(frozen=True, slots=True)
class _Warned:
    """One warning of one run."""

    policy: str
    hold: str
    step: int
    warning: ControllerWarning


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
    """Run every policy under every hold. ``progress(hold, policy, steps_done)``. Raises ConfigError.

    Holds that plan alike (``Scenario.planned_hold``) are run once and share their rows.
    """
    if not policies:
        raise ConfigError(f"No policy is named; give one or more of fixed-G, {', '.join(DEFAULT_POLICIES[4:])}.")
    moments = len(scenario.process.steps) if isinstance(scenario.process, Trace) else RATE_MOMENTS
    groups = max(MIN_RATE_GROUPS, RATE_GROUPS // moments)
    table = straggler_probabilities(scenario.process, config.candidates, config.tau, moments, groups)
    rates = table.mean(axis=0).tolist()
    oracle = best_mixture(list(config.utilities), rates, config.delta)
    for name in policies:
        _quiet_policy(name, config, scenario, oracle["weights"])  # an unknown name fails before an hour of work
    rows: dict[str, list[dict[str, Any]]] = {}
    records: dict[str, dict[str, RunRecord]] = {}
    warned: list[_Warned] = []
    for together in alike(scenario, holds):
        hold = together[0]
        held = replace(scenario, hold=hold)
        found: dict[str, RunRecord] = {}
        for name in policies:
            policy = _quiet_policy(name, config, held, oracle["weights"])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ControllerWarning)
                steps: list[int] = []

                def step_done(done: int, hold=hold, name=name, caught=caught, steps=steps) -> None:
                    steps += [done] * (len(caught) - len(steps))
                    if progress is not None:
                        progress(hold, name, done)

                found[name] = run_policy(name, policy, held, step_done)
            warned += [
                _Warned(name, " and ".join(together), step, warning.message)
                for step, warning in zip(steps, caught, strict=True)
                if issubclass(warning.category, ControllerWarning)
            ]
        wall = min(float(record.continuous_seconds.sum()) for record in found.values())
        for name in together:
            records[name], rows[name] = found, [summarise(record, wall) for record in found.values()]
    return Comparison(dict(zip(config.candidates, rates, strict=True)), oracle, rows, records, said_once(warned))


def _quiet_policy(name: str, config: SAGCConfig, scenario: Scenario, mixture: Sequence[float]) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ControllerWarning)  # whoever made ``config`` was told
        return make_policy(name, config, scenario, mixture)


def alike(scenario: Scenario, holds: Sequence[str]) -> list[tuple[str, ...]]:
    """The holds in their order, those that plan every step alike together."""
    together: dict[str, list[str]] = {}
    for hold in dict.fromkeys(holds):
        together.setdefault(replace(scenario, hold=hold).planned_hold, []).append(hold)
    return [tuple(names) for names in together.values()]


def said_once(warned: Sequence[_Warned]) -> list[str]:
    """One sentence for each matter, naming all that it concerns."""
    matters: dict[Any, list[_Warned]] = {}
    for one in warned:
        is_reach = isinstance(one.warning, DeltaOutOfReachWarning)
        matters.setdefault(DeltaOutOfReachWarning if is_reach else str(one.warning), []).append(one)
    return [f"{_sentence(together)} Concerns {_concerned(together)}." for together in matters.values()]


def _sentence(together: Sequence[_Warned]) -> str:
    first = together[0].warning
    if len(together) == 1 or not isinstance(first, DeltaOutOfReachWarning):
        return str(first)
    low, high = (f"{f(one.warning.rate for one in together):.0%}" for f in (min, max))
    return first.sentence(f"{low if low == high else f'{low} to {high}'} of its groups")


def _concerned(together: Sequence[_Warned]) -> str:
    holds_of: dict[str, list[str]] = {}
    for one in together:
        holds_of.setdefault(one.policy, []).append(one.hold)
    policies_of: dict[tuple[str, ...], list[str]] = {}
    for policy, holds in holds_of.items():
        policies_of.setdefault(tuple(dict.fromkeys(holds)), []).append(policy)
    parts = [f"{', '.join(policies)} with {', '.join(holds)} held" for holds, policies in policies_of.items()]
    first, last = (f(one.step for one in together) for f in (min, max))
    return f"{'; '.join(parts)}, {f'at step {first}' if first == last else f'from steps {first} to {last} on'}"


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
