"""Summaries, intervals and the rank test: right on hand-made cases, and calm when there is nothing but noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.bench.stats import RatioInterval, holm, rank_sum_p, ratio_interval, smallest_p, summarize

runs = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9)


def test_summary_of_a_hand_made_series():
    summary = summarize([4.0, 1.0, 3.0, 2.0])
    assert (summary.median, summary.q25, summary.q75) == (2.5, 1.75, 3.25)
    assert (summary.lowest, summary.highest, summary.num_runs) == (1.0, 4.0, 4)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_no_summary_of_nothing_or_of_what_is_no_number(values):
    with pytest.raises(ValueError, match="finite"):
        summarize(values)


@settings(max_examples=25)
@given(runs, runs)
def test_interval_encloses_the_ratio_and_turns_over_with_it(above, below):
    there, back = ratio_interval(above, below), ratio_interval(below, above)
    assert there.low <= there.ratio * (1 + 1e-12)
    assert there.high >= there.ratio * (1 - 1e-12)
    assert there.ratio * back.ratio == pytest.approx(1.0)


@settings(max_examples=25)
@given(runs, st.floats(0.5, 2.0))
def test_scaling_one_side_scales_the_interval(values, factor):
    plain = ratio_interval(values, [1.0, 2.0, 3.0])
    scaled = ratio_interval([factor * v for v in values], [1.0, 2.0, 3.0])
    assert (scaled.low, scaled.high) == pytest.approx((factor * plain.low, factor * plain.high))


def test_pairing_removes_a_drift_that_hits_both():
    drift = np.linspace(1.0, 3.0, 9)
    paired = ratio_interval(1.2 * drift, drift, is_paired=True)
    unpaired = ratio_interval(1.2 * drift, drift)
    assert (paired.low, paired.high) == pytest.approx((1.2, 1.2))
    assert unpaired.low < 0.9
    assert unpaired.high > 1.5


def test_interval_covers_the_true_ratio_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    hits = 0
    for seed in range(200):
        interval = ratio_interval(1.1 * rng.lognormal(0, 0.1, 15), rng.lognormal(0, 0.1, 15), seed=seed)
        hits += interval.low <= 1.1 <= interval.high
    assert 0.90 <= hits / 200 <= 1.0


def test_excludes_needs_the_whole_interval_beyond_the_margin():
    assert RatioInterval(1.2, 1.1, 1.3).excludes()
    assert not RatioInterval(1.2, 1.1, 1.3).excludes(margin=1.15)
    assert RatioInterval(0.8, 0.7, 0.85).excludes(margin=1.15)
    assert not RatioInterval(1.0, 0.9, 1.1).excludes()


def test_rank_test_counts_the_splits():
    assert rank_sum_p([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70) == smallest_p(4, 4)
    assert rank_sum_p([1, 4], [2, 3]) == 1.0
    assert rank_sum_p([1, 1, 1], [1, 1, 1]) == 1.0


def test_rank_test_by_drawing_agrees_with_the_normal_approximation():
    rng = np.random.default_rng(5)
    a, b = rng.normal(0, 1, 30), rng.normal(0.5, 1, 30)
    rank_sum = sum(np.searchsorted(np.sort(np.concatenate((a, b))), a) + 1)
    z = abs(rank_sum - 30 * 61 / 2) / (30 * 30 * 61 / 12) ** 0.5
    assert rank_sum_p(a, b) == pytest.approx(math.erfc(z / 2**0.5), rel=0.1)
    assert rank_sum_p(a, b) == rank_sum_p(a, b)


def test_rank_test_raises_false_alarms_as_seldom_as_it_says():
    rng = np.random.default_rng(3)
    alarms = sum(rank_sum_p(rng.lognormal(0, 0.2, 5), rng.lognormal(0, 0.2, 5)) <= 0.05 for _ in range(300))
    assert alarms / 300 <= 0.07


def test_holm_lets_through_less_than_each_test_alone():
    assert holm([0.04]) == [True]
    assert holm([0.04, 0.04]) == [False, False]
    assert holm([0.04, 0.001]) == [True, True]
    assert holm([0.03, 0.001, 0.9]) == [False, True, False]
    assert holm([]) == []
