"""Medians, and what may be said about the ratio of two: bootstrap intervals and an exact rank test.

A benchmark has few runs, skewed by the machine's other work, so nothing here assumes a distribution. Sources: the
percentile bootstrap (Efron 1979); Mann-Whitney's rank sum, enumerated for few runs; Holm's step-down correction (1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 4000
MAX_ENUMERATED = 50_000
"""Beyond so many ways to split the runs in two, the rank test draws this many of them (seeded)."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one metric over its runs; quartiles by linear interpolation."""

    median: float
    q25: float
    q75: float
    lowest: float
    highest: float
    num_runs: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """A ratio of medians with its bootstrap interval."""

    ratio: float
    low: float
    high: float

    def excludes(self, ratio: float = 1.0, margin: float = 1.0) -> bool:
        """True when the interval lies wholly above ``ratio * margin`` or below ``ratio / margin`` (margin >= 1)."""
        return self.low > ratio * margin or self.high < ratio / margin


def summarize(values: Sequence[float]) -> Summary:
    """Raises ValueError for no values or for one that is not finite."""
    array = _checked(values)
    q25, median, q75 = np.quantile(array, (0.25, 0.5, 0.75))
    return Summary(float(median), float(q25), float(q75), float(array.min()), float(array.max()), array.size)


def ratio_interval(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    is_paired: bool = False,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> RatioInterval:
    """Median(numerator) / median(denominator), all values > 0.

    ``is_paired``: the i-th values were measured next to each other (alternating runs), so that the machine's drift hits
    both; runs are then resampled in pairs. Runs beyond the shorter list are left out of a paired interval.
    """
    above, below = _checked(numerator), _checked(denominator)
    if min(above.min(), below.min()) <= 0:
        raise ValueError("a ratio needs values above 0")
    if is_paired:
        num_pairs = min(above.size, below.size)
        above, below = above[:num_pairs], below[:num_pairs]
    rng = np.random.default_rng(seed)
    above_draws = rng.integers(above.size, size=(NUM_RESAMPLES, above.size))
    below_draws = above_draws if is_paired else rng.integers(below.size, size=(NUM_RESAMPLES, below.size))
    ratios = np.median(above[above_draws], axis=1) / np.median(below[below_draws], axis=1)
    low, high = np.quantile(ratios, ((1 - confidence) / 2, (1 + confidence) / 2))
    return RatioInterval(float(np.median(above) / np.median(below)), float(low), float(high))


def rank_sum_p(first: Sequence[float], second: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of the rank-sum test: how often a random split of all runs is as one-sided as this one."""
    a, b = _checked(first), _checked(second)
    ranks = _ranks(np.concatenate((a, b)))
    middle = a.size * (ranks.size + 1) / 2
    observed = abs(ranks[: a.size].sum() - middle)
    if math.comb(ranks.size, a.size) <= MAX_ENUMERATED:
        sums = ranks[np.array(list(combinations(range(ranks.size), a.size)))].sum(axis=1)
        return float(np.mean(np.abs(sums - middle) >= observed - 1e-9))
    rng = np.random.default_rng(seed)
    orders = rng.permuted(np.broadcast_to(ranks, (MAX_ENUMERATED, ranks.size)), axis=1)
    extreme = np.abs(orders[:, : a.size].sum(axis=1) - middle) >= observed - 1e-9
    return float((extreme.sum() + 1) / (MAX_ENUMERATED + 1))


def smallest_p(num_first: int, num_second: int) -> float:
    """The p-value when every run of one side beats every run of the other: whether so few runs can tell at all."""
    return min(1.0, 2.0 / math.comb(num_first + num_second, num_first))


def holm(p_values: Sequence[float], level: float = 1 - CONFIDENCE) -> list[bool]:
    """Which of several tests stay significant when one false alarm among all is to be rarer than ``level``."""
    significant = [False] * len(p_values)
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - place):
            break
        significant[index] = True
    return significant


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; ties share their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _checked(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"need at least one run and finite values, got {list(values)}")
    return array
