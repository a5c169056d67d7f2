"""Dynamic sampling, overlong punishment, truncation masks and shaped rewards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.algo.config import FilterConfig, LossConfig
from sagc_fast.algo.filters import (
    dynamic_sampling_mask,
    has_signal,
    overlong_cache_length,
    refill_size,
    soft_overlong_punishment,
    truncation_mask,
)
from sagc_fast.algo.rewards import kl_penalised_rewards, shape_rewards
from sagc_fast.errors import ConfigError


def test_overlong_punishment_is_exact_at_the_edges():
    # L_max 100, L_cache 20: free up to 80, then (80 - L) / 20, so -1/20 at 81 and -1 at 100 and beyond.
    lengths = torch.tensor([1, 79, 80, 81, 90, 95, 99, 100, 101, 5000])
    result = soft_overlong_punishment(lengths, 100, 20)
    assert result.tolist() == [0.0, 0.0, 0.0, *(torch.tensor([-0.05, -0.5, -0.75, -0.95]).tolist()), -1.0, -1.0, -1.0]
    assert not torch.signbit(result[:3]).any()


def test_overlong_punishment_without_a_cache_is_a_step():
    assert soft_overlong_punishment(torch.tensor([9, 10, 11]), 10, 0).tolist() == [0.0, 0.0, -1.0]


@given(st.integers(1, 5000), st.data())
def test_overlong_punishment_never_rises_with_length(max_length, data):
    cache = data.draw(st.integers(0, max_length))
    lengths = torch.arange(0, max_length + 3)
    result = soft_overlong_punishment(lengths, max_length, cache)
    assert (result.diff() <= 0).all()
    assert result.min() >= -1
    assert result.max() <= 0
    assert result[max_length - cache].item() == 0.0


@pytest.mark.parametrize("cache", [-1, 11])
def test_an_overlong_cache_outside_the_cap_is_refused(cache):
    with pytest.raises(ConfigError, match=f"cache is {cache} tokens.*between 0 and the length cap of 10"):
        soft_overlong_punishment(torch.tensor([1]), 10, cache)


def test_the_cache_is_dapos_fifth():
    assert overlong_cache_length(20480, FilterConfig(overlong_cache_fraction=0.2)) == 4096


def test_dynamic_sampling_with_unequal_groups():
    # Group 4: 1 of 3 correct, kept. Group 0: 2 of 2. Group 9: 0 of 4. Group 1: 1 of 2, kept.
    groups = torch.tensor([4, 0, 9, 9, 4, 1, 0, 9, 1, 9, 4])
    outcomes = torch.tensor([1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0], dtype=torch.bool)
    assert dynamic_sampling_mask(outcomes, groups).tolist() == [g in (4, 1) for g in groups.tolist()]


def test_dynamic_sampling_judges_valid_completions_alone():
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    outcomes = torch.tensor([1, 1, 0, 1, 0, 0], dtype=torch.bool)
    valid = torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool)
    assert dynamic_sampling_mask(outcomes, groups, valid).tolist() == [False] * 3 + [True] * 3


def test_dynamic_sampling_refuses_rewards():
    with pytest.raises(ConfigError, match="not by rewards"):
        dynamic_sampling_mask(torch.tensor([0.5, 1.0]), torch.tensor([0, 0]))


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=9), min_size=1, max_size=8))
def test_the_mask_and_the_one_group_rule_agree(groups):
    outcomes = torch.tensor([o for g in groups for o in g])
    ids = torch.tensor([i for i, g in enumerate(groups) for _ in g])
    assert dynamic_sampling_mask(outcomes, ids).tolist() == [has_signal(g) for g in groups for _ in g]


DYNAMIC = FilterConfig(dynamic_sampling=True, max_refill_factor=3.0, max_refill_seconds=60.0)


@pytest.mark.parametrize(
    ("kept", "sampled", "seconds", "wanted"),
    [
        (8, 8, 1.0, 0),  # enough
        (4, 8, 1.0, 8),  # half are kept, 4 are missing: draw 8
        (0, 8, 1.0, 8),  # nothing kept so far: a whole round
        (6, 8, 1.0, 3),  # 2 missing, 3 of 4 kept: 2 x 8 / 6 = 2.67, so 3
        (1, 20, 1.0, 4),  # the budget of 3 x 8 prompts leaves 4
        (1, 24, 1.0, 0),  # the budget is used up
        (1, 8, 60.0, 0),  # the time is used up
    ],
)
def test_refills_follow_the_share_kept_within_the_budget(kept, sampled, seconds, wanted):
    assert refill_size(8, kept, sampled, seconds, 8, DYNAMIC) == wanted


def test_no_refill_without_dynamic_sampling():
    assert refill_size(8, 0, 8, 0.0, 8, FilterConfig()) == 0


@given(st.integers(1, 40), st.integers(1, 40), st.floats(1.0, 6.0), st.randoms(use_true_random=False))
def test_refilling_ends_whatever_is_kept(wanted, round_size, factor, rng):
    config = FilterConfig(dynamic_sampling=True, max_refill_factor=factor)
    kept, sampled, rounds = 0, 0, 0
    more = wanted
    while more:
        assert more > 0
        sampled += more
        kept += rng.choice([0, rng.randint(0, more)])
        rounds += 1
        more = refill_size(wanted, kept, sampled, 0.0, round_size, config)
    assert sampled <= max(wanted, math.floor(wanted * factor))
    assert rounds <= sampled


def test_truncation_mask():
    truncated = torch.tensor([True, False])
    assert truncation_mask(truncated, FilterConfig(mask_truncated=True)).tolist() == [False, True]
    assert truncation_mask(truncated, FilterConfig()).tolist() == [True, True]


def test_shaped_rewards_add_the_punishment_only_when_it_is_on():
    rewards, lengths = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([80, 90, 100])
    assert shape_rewards(rewards, lengths, 100, FilterConfig()).tolist() == [1.0, 1.0, 0.0]
    shaped = shape_rewards(rewards, lengths, 100, FilterConfig(overlong_cache_fraction=0.2))
    assert shaped.tolist() == [1.0, 0.5, -1.0]


def test_kl_in_the_reward_by_hand():
    # Completion 0 has tokens with log pi - log ref = 0.5 and -0.25 (k1 sums to 0.25), completion 1 one with 1.0 and a
    # masked one. R - 0.1 x sum: 1 - 0.025 = 0.975 and 0 - 0.1 = -0.1.
    logp = torch.tensor([-1.0, -2.0, -3.0, -9.0])
    ref = torch.tensor([-1.5, -1.75, -4.0, -1.0])
    mask = torch.tensor([True, True, True, False])
    config = LossConfig(kl_beta=0.1, kl_in="reward", kl_estimator="k1")
    result = kl_penalised_rewards(torch.tensor([1.0, 0.0]), logp, ref, torch.tensor([0, 0, 1, 1]), mask, config=config)
    torch.testing.assert_close(result, torch.tensor([0.975, -0.1], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_kl_in_the_loss_leaves_the_rewards_alone():
    rewards = torch.tensor([1.0, 0.0])
    index = torch.tensor([0, 1])
    result = kl_penalised_rewards(rewards, torch.zeros(2), torch.ones(2), index, config=LossConfig(kl_beta=0.1))
    assert result.tolist() == [1.0, 0.0]
