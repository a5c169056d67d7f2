"""tau and delta from a recorded trace: the tau that tells group sizes apart best, the delta that a target asks for.

tau. The controller sees group sizes only through their straggler rates p_G(tau), and its price must reach
(u - u') / (p - p'). Where all rates are near 0 or near 1 nothing can be steered. So tau is taken where the rate of the
largest candidate exceeds that of the smallest by most.

delta. Each delta buys a mixture of group sizes (the oracle's). The suggested one is the cheapest, in predicted step
seconds, that keeps the share ``keep`` of the informative groups which the largest size would give at equal prompts.
Both rules are ours; the paper leaves the two values to the user.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sagc_fast.controller.config import ControllerWarning, SAGCConfig
from sagc_fast.controller.explorers import best_mixture
from sagc_fast.controller.processes import LengthProcess, Trace
from sagc_fast.controller.sagc import SAGC
from sagc_fast.controller.simulate import Scenario, run_policy
from sagc_fast.errors import ConfigError

TAUS = tuple(sorted({round(1.2 * 1.05**i, 1) for i in range(44)}))
"""Values of tau that are tried: 1.2 to 9.8, in steps of about 5% (ours)."""

MIN_SPREAD = 0.05
"""Smallest difference of straggler rates worth steering on (ours)."""

MANY_CLIPPED = 0.1
"""Share of completions at the length cap beyond which ratios are censored too much to trust (ours)."""

FEW_GROUPS = 200
"""Recorded groups below which the rates are too uncertain to be taken at their word (ours)."""

NUM_GROUPS = 2000
"""Groups drawn per size to estimate its rates and costs."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Proposed values and what they rest on."""

    tau: float
    delta: float
    rates: dict[int, float]
    """Straggler rate of every candidate at this tau."""
    shares: dict[int, float]
    """Steps of each candidate in the best mixture at this delta, which only hindsight knows."""
    step_seconds: float
    """Predicted, with this mixture, at equal prompts per step."""
    largest_step_seconds: float
    """The same with the largest candidate alone."""
    kept: float
    """Informative groups per step relative to the largest candidate."""
    replayed_rate: float
    """Straggler rate of SAGC with the suggested values, run on the trace (its last three quarters, as what follows)."""
    replayed_group_size: float
    replayed_shares: dict[int, float]
    """Steps that SAGC gave to each candidate."""
    replayed_kept: float
    """Informative groups per step of SAGC relative to the largest candidate."""
    replayed_seconds: float
    """Predicted, per step of SAGC."""
    clipped_ratio: float
    reasons: list[str]
    """Why this tau, why this delta, and between which values delta steers at all."""
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def suggest(
    process: Trace | LengthProcess, candidates: Sequence[int], scenario: Scenario, keep: float = 0.85
) -> Suggestion:
    """Propose tau and delta for these candidates; costs, difficulties and prompts per step are the scenario's.

    Raises ConfigError when ``keep`` is not in (0, 1] or no tau tells the candidates apart.
    """
    if not 0.0 < keep <= 1.0:
        raise ConfigError(f"keep is {keep!r}; it must be a share in (0, 1].")
    sizes = SAGCConfig(candidates=tuple(candidates), tau=1.5).candidates
    if len(sizes) < 2:
        raise ConfigError(f"The candidates are {sizes}; name at least two group sizes to choose between.")
    ratios, seconds, clipped = _measure(process, sizes, scenario)
    tau, rates = _widest_tau(ratios)
    delta, weights = _cheapest_delta(sizes, rates, seconds, scenario, keep)
    informative = np.array([scenario.difficulties.informative_share(size) for size in sizes])
    config = _quiet_config(sizes, tau, delta)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ControllerWarning)
        record = run_policy("sagc", SAGC(config), replace(scenario, process=process, tau=tau, hold="prompts"))
    settled = slice(len(record.straggler_rate) // 4, None)
    played = record.group_size[settled]
    return Suggestion(
        tau=tau,
        delta=delta,
        rates=dict(zip(sizes, rates.round(4).tolist(), strict=True)),
        shares=dict(zip(sizes, weights.round(3).tolist(), strict=True)),
        step_seconds=float(weights @ seconds),
        largest_step_seconds=float(seconds[-1]),
        kept=float(weights @ informative / informative[-1]),
        replayed_rate=float(record.straggler_rate[settled].mean()),
        replayed_group_size=float(played.mean()),
        replayed_shares={size: float((played == size).mean().round(3)) for size in sizes},
        replayed_kept=float(record.informative_groups[settled].mean() / (informative[-1] * scenario.num_prompts)),
        replayed_seconds=float(record.continuous_seconds[settled].mean()),
        clipped_ratio=clipped,
        reasons=_reasons(sizes, tau, rates, delta, weights @ seconds, seconds[-1], keep),
        notes=_notes(process, sizes, tau, clipped),
    )


def _measure(
    process: Trace | LengthProcess, sizes: Sequence[int], scenario: Scenario
) -> tuple[list[np.ndarray], np.ndarray, float]:
    """Per size: max / median of many groups over the whole run, and the mean seconds of a step; share of clipped."""
    rng = np.random.default_rng([scenario.seed, 5])
    ratios, seconds, clipped = [], np.zeros(len(sizes)), 0.0
    num_steps = max(1, NUM_GROUPS // scenario.num_prompts)
    for place, size in enumerate(sizes):
        found = []
        for step in range(num_steps):
            ids = rng.integers(int(process.num_problems), size=scenario.num_prompts)
            groups = process.sample(rng, (step + 0.5) / num_steps, ids, size)
            found.append(groups.max(axis=1) / np.maximum(np.median(groups, axis=1), 1.0))
            flat = groups.reshape(-1)
            total = scenario.costs.continuous_seconds(flat) + scenario.costs.other_seconds(int(flat.sum()))
            seconds[place] += total / num_steps
            clipped += float((flat >= process.cap).mean()) / (num_steps * len(sizes))
        ratios.append(np.concatenate(found))
    return ratios, seconds, clipped


def _widest_tau(ratios: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
    table = np.array([[float((ratio > tau).mean()) for ratio in ratios] for tau in TAUS])
    spread = table[:, -1] - table[:, 0]
    best = int(np.argmax(spread))
    if spread[best] < MIN_SPREAD:
        raise ConfigError(
            f"No tau between {TAUS[0]} and {TAUS[-1]} tells the candidates apart on this trace (their straggler rates "
            f"differ by {spread[best]:.3f} at most): group size does not change stragglers here; use the largest."
        )
    return TAUS[best], table[best]


def _cheapest_delta(
    sizes: Sequence[int], rates: np.ndarray, seconds: np.ndarray, scenario: Scenario, keep: float
) -> tuple[float, np.ndarray]:
    """The delta in 0.01 ... 0.99 whose mixture is cheapest among those that keep enough informative groups."""
    informative = np.array([scenario.difficulties.informative_share(size) for size in sizes])
    utilities = np.log2(sizes).tolist()
    options = []
    for delta in np.arange(0.01, 1.0, 0.01).round(2).tolist():
        mixture = best_mixture(utilities, rates.tolist(), delta)
        weights = np.array(mixture["weights"])
        if mixture["is_feasible"] and weights @ informative >= keep * informative[-1]:
            options.append((float(weights @ seconds), delta, weights))
    if not options:
        return 0.99, np.eye(len(sizes))[-1]
    _, delta, weights = min(options, key=lambda option: option[:2])
    return delta, weights


def _reasons(
    sizes: Sequence[int], tau: float, rates: np.ndarray, delta: float, cost: float, largest_cost: float, keep: float
) -> list[str]:
    largest = f"G={sizes[-1]}"
    lowest = int(np.argmin(rates))
    return [
        f"tau={tau:g}: of {TAUS[0]} to {TAUS[-1]}, where {largest} straggles most beyond G={sizes[0]} "
        f"({rates[-1]:.0%} of groups against {rates[0]:.0%}), so that group size steers best.",
        f"delta={delta:g}: the cheapest ({cost:.2f} s a step, {largest_cost:.2f} with {largest} alone) that keeps "
        f"{keep:.0%} of the informative groups of {largest} (--keep).",
        f"delta steers between {rates[lowest]:.2f}, below which even G={sizes[lowest]} straggles too often, and "
        f"{rates[-1]:.2f}, from where it is always {largest}.",
    ]


def _quiet_config(sizes: tuple[int, ...], tau: float, delta: float) -> SAGCConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ControllerWarning)  # the notes say it
        return SAGCConfig(candidates=sizes, tau=tau, delta=delta)


def _notes(process: Trace | LengthProcess, sizes: Sequence[int], tau: float, clipped: float) -> list[str]:
    notes = []
    num_recorded = sum(map(len, process.steps)) if isinstance(process, Trace) else FEW_GROUPS
    if num_recorded < FEW_GROUPS:
        notes.append(f"The trace holds {num_recorded} groups only: its rates are uncertain by several points.")
    if isinstance(process, Trace) and process.largest_group < sizes[-1]:
        notes.append(
            f"The trace has no group larger than {process.largest_group}: G={sizes[-1]} was drawn from it with "
            "replacement, so its straggler rate is underestimated; record a few steps with the largest candidate."
        )
    if clipped > MANY_CLIPPED:
        notes.append(
            f"{clipped:.0%} of the completions are cut at the length cap: cut lengths hide stragglers; raise "
            "max_new_tokens before trusting any rate."
        )
    if sizes[0] == 2 and tau >= 2.0:
        notes.append(f"G=2 cannot straggle at tau={tau:g}: the longest of two is at most twice their median.")
    return notes
