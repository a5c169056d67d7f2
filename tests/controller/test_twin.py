"""The compiled core against its plain-Python twin, and the twin against what is known from elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.controller import SAGC, SAGCConfig, _jit
from sagc_fast.controller import _layout as at
from sagc_fast.controller._beta import beta_cdf, beta_quantile
from sagc_fast.controller._twin import TwinCore, beta_variate, log_gamma_variate, median, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    """Random123's test vectors for philox4x32-10, in both cores."""
    assert philox(counter, key) == expected
    assert _jit._philox(*map(np.uint64, counter), *map(np.uint64, key)) == expected


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.7), (1.0, 1.0), (2.5, 6.0), (400.0, 130.0)])
def test_beta_draws_have_the_distribution_of_beta(alpha, beta):
    """Kolmogorov-Smirnov distance of 4000 draws from the Beta CDF; 1.95 / sqrt(n) is passed by chance once in 1000."""
    draws = sorted(beta_variate(alpha, beta, step, 3, (7, 9)) for step in range(4000))
    cdf = np.array([beta_cdf(x, alpha, beta) for x in draws])
    ranks = np.arange(len(draws) + 1) / len(draws)
    assert max(np.abs(cdf - ranks[1:]).max(), np.abs(cdf - ranks[:-1]).max()) < 1.95 / math.sqrt(len(draws))


def test_draws_of_different_steps_arms_and_seeds_are_uncorrelated():
    base = np.array([beta_variate(2, 3, step, 0, (1, 0)) for step in range(2000)])
    for other in (
        [beta_variate(2, 3, step + 1, 0, (1, 0)) for step in range(2000)],
        [beta_variate(2, 3, step, 1, (1, 0)) for step in range(2000)],
        [beta_variate(2, 3, step, 0, (2, 0)) for step in range(2000)],
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.08


def test_quantiles_invert_the_cdf_and_match_known_values():
    assert beta_cdf(0.3, 1.0, 1.0) == pytest.approx(0.3, abs=1e-12)
    assert beta_cdf(0.5, 2.0, 3.0) == pytest.approx(0.6875, abs=1e-12)  # 1 - 5/16, a binomial tail
    assert beta_quantile(0.05, 1.0, 3.0) == pytest.approx(1 - 0.95 ** (1 / 3), abs=1e-9)
    for alpha, beta in ((0.3, 0.4), (3.0, 500.0), (5000.0, 7000.0)):
        assert beta_cdf(beta_quantile(0.95, alpha, beta), alpha, beta) == pytest.approx(0.95, abs=1e-6)


@given(
    st.floats(1e-6, 1e5),
    st.integers(0, 2**53),
    st.integers(0, 2**20),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=200, deadline=None)
def test_gamma_draws_of_both_cores_agree(shape, step, stream, seed):
    key = (seed & 0xFFFFFFFF, seed >> 32)
    counter = (np.uint64(step & 0xFFFFFFFF), np.uint64(step >> 32), np.uint64(stream))
    compiled = _jit._log_gamma_variate(shape, *counter, *map(np.uint64, key))
    assert compiled == pytest.approx(log_gamma_variate(shape, step, stream, key), rel=1e-12, abs=1e-12)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_quickselect_finds_the_median(values):
    assert _jit._median(np.array(values), len(values)) == median(values) == float(np.median(values))


LENGTHS = st.one_of(st.integers(0, 2000), st.sampled_from([0, 1, 5, 4096]))
STEPS = st.lists(st.lists(st.lists(LENGTHS, max_size=9), max_size=6), min_size=1, max_size=25)
CONFIGS = st.builds(
    SAGCConfig,
    candidates=st.sampled_from([(3,), (4, 8), (4, 8, 16), (3, 5, 7, 9, 32)]),
    tau=st.sampled_from([1.1, 1.5, 2.0, 4.0]),
    delta=st.floats(0.01, 0.99),
    eta=st.sampled_from([0.1, 2.0, 20.0]),
    gamma=st.sampled_from([0.5, 0.97, 1.0]),
    prior_alpha=st.sampled_from([1e-3, 0.5, 1.0, 50.0]),
    prior_beta=st.sampled_from([1e-3, 0.5, 1.0, 50.0]),
    lambda_max=st.sampled_from([1.0, 20.0]),
    radius=st.integers(1, 3),
    dwell=st.integers(1, 3),
    signal=st.sampled_from(at.SIGNALS),
    ratio=st.sampled_from(at.RATIOS),
    fallback=st.booleans(),
    max_length=st.sampled_from([None, 1000]),
)


@given(CONFIGS, STEPS, st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None)
def test_twin_and_compiled_core_take_the_same_decisions(config, steps, seed):
    """Any configuration, ragged groups, empty groups, empty steps: the same choices, every number within 1e-12."""
    compiled, twin = SAGC(config, seed, backend="numba"), SAGC(config, seed, backend="python")
    for lengths in steps:
        compiled.observe(lengths)
        twin.observe(lengths)
        assert compiled.decide() == twin.decide()
    assert compiled._core.backend == "numba"
    assert isinstance(twin._core, TwinCore)
    ours, oracle = compiled.state_dict(), twin.state_dict()
    assert ours.keys() == oracle.keys()
    for name in (*at.SCALARS, *at.ARRAYS):
        np.testing.assert_allclose(ours[name], oracle[name], rtol=1e-12, atol=1e-12, err_msg=name)
        assert np.isfinite(ours[name]).all()
