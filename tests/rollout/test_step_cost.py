"""The cost of a token against that of a step, learnt from noisy seconds."""

from __future__ import annotations

import math
import random

import pytest

from sagc_fast.rollout.speculation import most_rows
from sagc_fast.rollout.step_cost import MOST_FIXED_TOKENS, StepCost, roofline


def observe(cost, a, b, steps, noise=0.2, seed=0):
    rng = random.Random(seed)
    for _ in range(steps):
        tokens = rng.randint(1, 40)
        cost.observe(tokens, math.hypot(a, b * tokens) * rng.uniform(1 - noise, 1 + noise))


@pytest.mark.parametrize("prior", [3.0, 20.0, 100.0])
def test_the_ratio_is_found_from_any_first_estimate(prior):
    cost = StepCost(prior)
    observe(cost, a=4e-3, b=2e-4, steps=600)
    assert cost.fixed_tokens == pytest.approx(20, rel=0.4)
    assert cost.seconds(10) == pytest.approx(math.hypot(4e-3, 2e-3), rel=0.1)


def test_steps_of_one_size_leave_the_first_estimate_alone():
    cost = StepCost(15.0)
    for _ in range(500):
        cost.observe(8, 1e-3)
    assert cost.fixed_tokens == pytest.approx(15.0)
    assert cost.seconds(8) == pytest.approx(1e-3)


def test_interruptions_count_little_and_a_slower_machine_in_the_end():
    cost = StepCost(20.0)
    observe(cost, a=4e-3, b=2e-4, steps=600)
    before = cost.seconds(10)
    for _ in range(5):
        cost.observe(10, 1.0)
    assert cost.seconds(10) < 1.1 * before
    observe(cost, a=12e-3, b=6e-4, steps=1500)
    assert cost.seconds(10) == pytest.approx(3 * before, rel=0.15)


def test_a_fixed_ratio_listens_to_no_clock():
    cost = StepCost(12.0, is_learnt=False)
    observe(cost, a=4e-3, b=2e-6, steps=300)
    assert cost.fixed_tokens == 12.0
    assert cost.seconds(12) > 0


def test_extremes_stay_within_bounds_and_large_steps_are_left_out():
    cost = StepCost(12.0)
    for tokens in list(range(1, 41)) * 50:
        cost.observe(tokens, 1e-3)
    assert 12 < cost.fixed_tokens <= MOST_FIXED_TOKENS
    cost = StepCost(12.0)
    for tokens in list(range(1, 41)) * 50:
        cost.observe(tokens, 1e-3 * tokens)
    assert 0.5 <= cost.fixed_tokens < 5
    cost = StepCost(12.0)
    cost.observe(1000, 1.0)
    cost.observe(0, 1.0)
    assert cost.seconds(1) == 0


def test_the_roofline_of_known_models():
    """100 thousand parameters are bound by the host, 8 million by both, 494 million in bf16 by arithmetic."""
    assert roofline(0, 0)[0] == pytest.approx(60)
    assert 40 < roofline(100_000, 400_000)[0] < 60
    assert 8 < roofline(8_000_000, 32_000_000)[0] < 20
    assert 3 < roofline(494_000_000, 988_000_000)[0] < 12


def test_steps_done_in_bursts_cost_a_small_model_little_that_drafts_could_save():
    """A draft ends a burst: what it costs the host is more than all of a step of 100 thousand parameters."""
    for parameters, pays in ((100_000, False), (8_000_000, True)):
        assert (most_rows(*roofline(parameters, 4 * parameters, has_bursts=True)) > 0) == pays


def test_the_host_s_work_for_drafts_is_learnt_and_a_fixed_estimate_is_not():
    for is_learnt, expected in ((True, 1e-3), (False, StepCost(20.0).draft_seconds(4))):
        cost = StepCost(20.0, is_learnt)
        observe(cost, a=4e-3, b=2e-4, steps=600, noise=0)
        for _ in range(300):
            cost.observe_drafts(12, num_rows=4, seconds=cost.seconds(12) + 1e-3)
        assert cost.draft_seconds(4) == pytest.approx(expected, rel=0.05)


def test_steps_alike_count_as_they_would_one_by_one():
    together, apart = StepCost(10.0), StepCost(10.0)
    for num_tokens, seconds, num_steps in ((3, 4e-3, 7), (20, 9e-3, 32), (1, 3e-3, 5)):
        together.observe(num_tokens, seconds, num_steps)
        for _ in range(num_steps):
            apart.observe(num_tokens, seconds)
    assert together.fixed_tokens == pytest.approx(apart.fixed_tokens, rel=1e-9)
    assert together.seconds_per_token == pytest.approx(apart.seconds_per_token, rel=1e-9)
