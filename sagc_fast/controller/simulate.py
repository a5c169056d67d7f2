"""Run a group-size policy against a length process, and account for what the steps cost and teach.

One loop, ``run_policy``, for every policy and process: groups are drawn for the sizes the policy wants, it observes
their lengths, and the cost model turns lengths into seconds. ``_fast.py`` is the same for a million steps, without
lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sagc_fast.controller._twin import smooth
from sagc_fast.controller.costs import CostModel, Difficulties
from sagc_fast.controller.hold import num_prompts
from sagc_fast.controller.processes import LengthProcess, Trace


class Policy(Protocol):
    """What the loop needs of a controller."""

    def decide(self) -> int: ...

    def observe(self, lengths: Any, *, num_clipped: Any, problem_ids: Any, seconds: Any) -> None: ...

    def gauges(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Scenario:
    """What every policy of a comparison is put through. All defaults ours."""

    process: LengthProcess | Trace
    steps: int = 1000
    num_prompts: int = 16
    """Prompts per step under hold="prompts"; the other holds spend what it costs at ``reference_group_size`` (tokens:
    as the run begins)."""
    hold: str = "prompts"
    reference_group_size: int = 8
    tau: float = 2.0
    """Judges the reported straggler rate, whatever a policy's own event."""
    costs: CostModel = field(default_factory=CostModel)
    difficulties: Difficulties = field(default_factory=Difficulties)
    seed: int = 0

    @property
    def planned_hold(self) -> str:
        """The hold that steps are planned by: where lengths do not change, equal tokens are equal completions."""
        return "completions" if self.hold == "tokens" and not self.process.changes else self.hold

    def budget(self) -> float:
        """Prompts, completions or tokens of a step, as ``planned_hold`` counts."""
        if self.planned_hold == "prompts":
            return self.num_prompts
        completions = self.num_prompts * self.reference_group_size
        return completions if self.planned_hold == "completions" else completions * self.first_length()

    def first_length(self) -> float:
        """Mean completion length as the run begins, from a sample of its own (tokens)."""
        rng = np.random.default_rng([self.seed, 7])
        ids = np.arange(min(4096, int(self.process.num_problems)))
        return max(1.0, float(self.process.sample(rng, 0.0, ids, 16).mean()))


@dataclass(slots=True)
class RunRecord:
    """What one policy did, step by step (arrays of length ``steps``)."""

    name: str
    group_size: np.ndarray
    """Mean G of the step's groups."""
    log2_group_size: np.ndarray
    straggler_rate: np.ndarray
    """Share of the step's groups beyond tau."""
    num_groups: np.ndarray
    continuous_seconds: np.ndarray
    """Whole step, rollout with continuous batching."""
    padded_seconds: np.ndarray
    """Whole step, rollout in padded batches."""
    num_tokens: np.ndarray
    informative_groups: np.ndarray
    """Expected number of groups with a right and a wrong answer."""
    clipped_ratio: np.ndarray
    price: np.ndarray
    """lambda after the step; NaN for policies without one."""
    posteriors: list[tuple[int, dict[int, tuple[float, float]]]]
    """Every ``POSTERIOR_EVERY`` steps (step, {G: (alpha, beta)}); empty for policies without posteriors."""


POSTERIOR_EVERY = 10

_COLUMNS = (
    "group_size",
    "log2_group_size",
    "straggler_rate",
    "num_groups",
    "continuous_seconds",
    "padded_seconds",
    "num_tokens",
    "informative_groups",
    "clipped_ratio",
    "price",
)


def run_policy(
    name: str, policy: Policy, scenario: Scenario, progress: Callable[[int], None] | None = None
) -> RunRecord:
    """Put one policy through a scenario. The draws depend on the scenario's seed, the step and the sizes alone.

    ``progress`` is called with the number of steps done.
    """
    columns = {column: np.full(scenario.steps, np.nan) for column in _COLUMNS}
    posteriors: list[tuple[int, dict[int, tuple[float, float]]]] = []
    budget = scenario.budget()
    mean_length = scenario.first_length() if scenario.planned_hold == "tokens" else None
    for step in range(scenario.steps):
        rng = np.random.default_rng([scenario.seed, 1, step])
        count = num_prompts(scenario.planned_hold, budget, policy.decide(), mean_length)
        ids = rng.integers(int(scenario.process.num_problems), size=count)
        sizes = policy.decide_groups(ids.tolist()) if hasattr(policy, "decide_groups") else [policy.decide()] * count
        groups = draw_groups(scenario.process, rng, step / scenario.steps, ids, sizes)
        account = _account(groups, sizes, scenario)
        policy.observe(
            groups,
            num_clipped=round(account["clipped_ratio"] * sum(sizes)),
            problem_ids=ids.tolist(),
            seconds=account["continuous_seconds"],
        )
        if mean_length is not None:  # of the last ten steps or so, as a trainer plans: never the step's own lengths
            mean_length = smooth(mean_length, account["num_tokens"] / sum(sizes), False)
        account["price"] = getattr(policy, "price", math.nan)
        for column, value in account.items():
            columns[column][step] = value
        if (step + 1) % POSTERIOR_EVERY == 0 and hasattr(policy, "posteriors"):
            posteriors.append((step + 1, policy.posteriors()))
        if progress is not None:
            progress(step + 1)
    return RunRecord(name=name, posteriors=posteriors, **columns)


def draw_groups(
    process: LengthProcess | Trace, rng: np.random.Generator, progress: float, ids: np.ndarray, sizes: list[int]
) -> np.ndarray | list[np.ndarray]:
    """Lengths of one group per problem: an array when all sizes are equal, else a list of arrays."""
    distinct = sorted(set(sizes))
    if len(distinct) == 1:
        return process.sample(rng, progress, ids, distinct[0])
    groups: list[np.ndarray] = [np.empty(0, np.int64)] * len(sizes)
    for size in distinct:
        places = [place for place, wanted in enumerate(sizes) if wanted == size]
        for place, group in zip(places, process.sample(rng, progress, ids[places], size), strict=True):
            groups[place] = group
    return groups


def straggles(groups: np.ndarray | list[np.ndarray], tau: float) -> np.ndarray:
    """One bool per group: its longest completion exceeds tau times its median one (paper)."""
    if isinstance(groups, np.ndarray):
        return groups.max(axis=1) > tau * np.median(groups, axis=1)
    return np.array([group.max() > tau * np.median(group) for group in groups])


def _account(groups: np.ndarray | list[np.ndarray], sizes: list[int], scenario: Scenario) -> dict[str, float]:
    """The columns of a RunRecord that follow from the lengths of one step."""
    flat = groups.reshape(-1) if isinstance(groups, np.ndarray) else np.concatenate(groups)
    tokens = int(flat.sum())
    other = scenario.costs.other_seconds(tokens)
    counts = {size: sizes.count(size) for size in set(sizes)}
    return {
        "group_size": sum(sizes) / len(sizes),
        "log2_group_size": sum(n * math.log2(size) for size, n in counts.items()) / len(sizes),
        "straggler_rate": float(straggles(groups, scenario.tau).mean()),
        "num_groups": len(sizes),
        "continuous_seconds": scenario.costs.continuous_seconds(flat) + other,
        "padded_seconds": scenario.costs.padded_seconds(flat) + other,
        "num_tokens": tokens,
        "informative_groups": sum(n * scenario.difficulties.informative_share(size) for size, n in counts.items()),
        "clipped_ratio": float((flat >= scenario.process.cap).mean()),
    }


def summarise(record: RunRecord, wall_seconds: float) -> dict[str, Any]:
    """Means per step over the whole run, and what fits into ``wall_seconds`` (continuous batching)."""
    elapsed = np.cumsum(record.continuous_seconds)
    done = int(np.searchsorted(elapsed, wall_seconds * (1.0 + 1e-12), side="right"))
    return {
        "policy": record.name,
        "straggler_rate": float(record.straggler_rate.mean()),
        "mean_group_size": float(record.group_size.mean()),
        "mean_log2_group_size": float(record.log2_group_size.mean()),
        "groups_per_step": float(record.num_groups.mean()),
        "tokens_per_step": float(record.num_tokens.mean()),
        "step_seconds": float(record.continuous_seconds.mean()),
        "padded_step_seconds": float(record.padded_seconds.mean()),
        "informative_groups_per_step": float(record.informative_groups.mean()),
        "informative_groups_per_second": float(record.informative_groups.sum() / elapsed[-1]),
        "clipped_ratio": float(record.clipped_ratio.mean()),
        "equal_wall_clock": {
            "seconds": wall_seconds,
            "steps": done,
            "informative_groups": float(record.informative_groups[:done].sum()),
            "tokens": float(record.num_tokens[:done].sum()),
        },
    }


def straggler_probabilities(
    process: LengthProcess | Trace,
    sizes: Sequence[int],
    tau: float,
    moments: int = 1,
    groups: int = 20_000,
    seed: int = 0,
) -> np.ndarray:
    """Monte-Carlo probability [moments, sizes] that a group straggles, at equally spaced moments of the run."""
    rng = np.random.default_rng([seed, 3])
    table = np.empty((moments, len(sizes)))
    for row in range(moments):
        for column, size in enumerate(sizes):
            ids = rng.integers(int(process.num_problems), size=groups)
            table[row, column] = straggles(process.sample(rng, (row + 0.5) / moments, ids, size), tau).mean()
    return table
