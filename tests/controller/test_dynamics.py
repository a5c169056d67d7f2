"""Long simulations: the rate is held, an impossible delta is survived, changes are followed, regret falls.

Events are drawn with the true straggler probabilities of lognormal lengths at tau=2; the controller is the compiled
core itself (``fast.simulate_events``). bench/controller_study.py runs the same over more cases and seeds.
"""

from __future__ import annotations

import math
import warnings
from functools import cache

import numpy as np
import pytest

from sagc_fast.controller import SAGC, ControllerWarning, SAGCConfig
from sagc_fast.controller.explorers import best_mixture
from sagc_fast.controller.fast import simulate_events
from sagc_fast.controller.processes import LengthProcess
from sagc_fast.controller.simulate import straggler_probabilities

SIGMAS = (0.3, 0.5, 0.7, 1.0)
DELTAS = (0.1, 0.2, 0.3, 0.4, 0.5)


@cache
def true_rates(sigma: float, candidates: tuple[int, ...]) -> np.ndarray:
    process = LengthProcess(median=1000.0, sigma=sigma, cap=math.inf)
    return straggler_probabilities(process, candidates, 2.0, groups=20_000)


def quiet_config(**options) -> SAGCConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ControllerWarning)
        return SAGCConfig(**options)


def feasible(candidates: tuple[int, ...]) -> list[tuple[float, float]]:
    return [
        (sigma, delta)
        for sigma in SIGMAS
        for delta in DELTAS
        if true_rates(sigma, candidates)[0, 0] < delta < true_rates(sigma, candidates)[0, -1]
    ]


@pytest.mark.parametrize("num_groups", [1, 4, 16, 64])
@pytest.mark.parametrize("candidates", [(4, 8, 16), (2, 4, 8, 16)])
def test_the_long_run_rate_is_within_two_points_of_every_feasible_delta(candidates, num_groups):
    cases = feasible(candidates)
    assert len(cases) >= 5
    for sigma, delta in cases:
        config = quiet_config(candidates=candidates, delta=delta)
        run = simulate_events(config, true_rates(sigma, candidates), 20_000, num_groups, seed=11)
        assert run.probabilities.mean() == pytest.approx(delta, abs=0.02), (sigma, delta)
        assert run.num_stragglers.mean() / num_groups == pytest.approx(delta, abs=0.02), (sigma, delta)


def test_a_delta_above_the_largest_arms_rate_costs_no_utility():
    """The constraint is slack: the largest arm is played, lambda rests at 0."""
    for delta in (0.2, 0.3, 0.4, 0.5):
        run = simulate_events(SAGCConfig(delta=delta), true_rates(0.3, (4, 8, 16)), 5000, 16, seed=1)
        assert (run.arms == 2).mean() > 0.99
        assert run.prices.mean() < 0.5


@pytest.mark.parametrize(("sigma", "delta"), [(0.5, 0.1), (0.7, 0.1), (0.7, 0.3), (1.0, 0.1), (1.0, 0.3), (1.0, 0.5)])
@pytest.mark.parametrize("num_groups", [4, 16, 64])
def test_an_infeasible_delta_holds_the_smallest_arm_and_bounds_lambda(sigma, delta, num_groups):
    run = simulate_events(SAGCConfig(delta=delta), true_rates(sigma, (4, 8, 16)), 3000, num_groups, seed=5)
    assert (run.arms == 0).mean() >= 0.95
    assert run.prices.max() <= 20.0


def test_an_infeasible_delta_is_said_once_and_survives_a_resume():
    def observe(controller: SAGC, steps: int) -> None:
        rng = np.random.default_rng(0)
        for _ in range(steps):
            controller.observe_counts(
                int(rng.binomial(16, (0.6, 0.9, 0.99)[(4, 8, 16).index(controller.decide())])), 16
            )

    controller = SAGC(SAGCConfig(delta=0.2))
    with pytest.warns(ControllerWarning, match=r"delta=0.2 is out of reach: even G=4 straggles in \d+%") as caught:
        observe(controller, 500)
    assert len(caught) == 1
    resumed = SAGC(SAGCConfig(delta=0.2))
    resumed.load_state_dict(controller.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observe(resumed, 100)


def test_a_feasible_delta_is_never_called_out_of_reach():
    rng = np.random.default_rng(3)
    controller = SAGC(SAGCConfig(delta=0.4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3000):
            p = true_rates(0.5, (4, 8, 16))[0, (4, 8, 16).index(controller.decide())]
            controller.observe_counts(int(rng.binomial(16, p)), 16)


@pytest.mark.parametrize("candidates", [(4, 8), (4, 8, 16), (2, 4, 8, 16, 32, 64)])
def test_without_stragglers_the_largest_arm_is_reached_and_kept(candidates):
    for seed in range(20):
        controller = SAGC(quiet_config(candidates=candidates, delta=0.1), seed)
        sizes = []
        for _ in range(6 * len(candidates)):
            sizes.append(controller.decide())
            controller.observe([[10, 11, 12, 10]] * 8)
        assert set(sizes[3 * len(candidates) :]) == {candidates[-1]}


CHANGES = [
    (before, after, delta)
    for before in SIGMAS
    for after in SIGMAS
    for delta in (0.1, 0.25, 0.4)
    if before != after and (delta > 0.1 or after < 1.0)
]


@pytest.mark.parametrize("num_groups", [8, 32])
def test_after_an_abrupt_change_the_rate_is_back_within_100_steps(num_groups):
    """Mean over eight seeds of the rate in steps 100 to 200 after the change, over every pair of spreads."""
    candidates = (2, 4, 8, 16)
    checked = 0
    for before, after, delta in CHANGES:
        rates = np.vstack([true_rates(before, candidates), true_rates(after, candidates)])
        if not rates[1, 0] < delta < rates[1, -1]:
            continue
        config = quiet_config(candidates=candidates, delta=delta)
        runs = [simulate_events(config, rates, 2000, num_groups, seed) for seed in range(8)]
        rate = np.mean([run.probabilities[1100:1200].mean() for run in runs])
        assert rate == pytest.approx(delta, abs=0.05), (before, after, delta)
        checked += 1
    assert checked > 15


def test_from_infeasible_to_feasible_the_price_has_not_wound_up():
    rates = np.vstack([true_rates(1.0, (4, 8, 16)), true_rates(0.5, (4, 8, 16))])
    runs = [simulate_events(SAGCConfig(delta=0.4), rates, 4000, 16, seed) for seed in range(8)]
    assert max(run.prices[:2000].max() for run in runs) < 15.0
    rate = np.mean([run.probabilities[2100:2200].mean() for run in runs])
    assert rate == pytest.approx(0.4, abs=0.05)


def test_average_regret_against_the_best_feasible_mixture_falls_with_time():
    """Utility given away plus constraint violated at the oracle's price, per step, after 100, 1000 and 10000 steps."""
    candidates, delta = (4, 8, 16), 0.4
    rates = true_rates(0.5, candidates)
    config = SAGCConfig(delta=delta)
    best = best_mixture(list(config.utilities), rates[0].tolist(), delta)
    regrets = []
    for steps in (100, 1000, 10_000):
        runs = [simulate_events(config, rates, steps, 16, seed) for seed in range(10)]
        utility = np.mean([np.array(config.utilities)[run.arms].mean() for run in runs])
        violation = np.mean([run.probabilities.mean() for run in runs]) - delta
        regrets.append(best["utility"] - utility + 4.0 * max(0.0, violation))
    assert regrets[0] > regrets[1] > regrets[2]
    assert regrets[2] < 0.06


def test_the_plain_rule_is_too_slow_and_does_not_hold_the_smallest_arm():
    """Why two departures from the plain rule are defaults: eta 0.1 has not paid for its start after 1000 steps, and
    without the fallback Thompson's draws leave the smallest arm more than one step in twenty."""
    plain = SAGCConfig(delta=0.4, eta=0.1, fallback=False)
    run = simulate_events(plain, true_rates(0.5, (4, 8, 16)), 1000, 16, seed=2)
    assert run.probabilities.mean() > 0.43
    tight = SAGCConfig(delta=0.2, eta=0.1, fallback=False)
    run = simulate_events(tight, true_rates(0.5, (4, 8, 16)), 3000, 16, seed=2)
    assert (run.arms == 0).mean() < 0.95
