"""Advantages against numbers worked out by hand, and what must hold for any groups."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagc_fast.algo.advantage import group_advantages
from sagc_fast.errors import ConfigError, RewardError


def advantages(rewards, groups, **options):
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64), **options
    )


# One group of four, rewards 1 0 0 1: mean 1/2, squares of the differences 4 x 1/4 = 1,
# std = sqrt(1 / (4 - 1)) = 0.5773503 with ddof 1, sqrt(1 / 4) = 0.5 with ddof 0.
GOLDEN = [
    ({}, 0.5 / (math.sqrt(1 / 3) + 1e-4)),
    ({"ddof": 0}, 0.5 / 0.5001),
    ({"eps": 0.0}, 0.8660254037844386),  # 0.5 x sqrt(3)
    ({"scale": "none"}, 0.5),
    ({"scale": "none", "baseline": "loo"}, 2 / 3),  # 1 - mean of (0, 0, 1) = 1 - 1/3; = 4/3 x 1/2
    ({"scale": "none", "adv_scale": "loo"}, 2 / 3),
    ({"adv_scale": "loo", "eps": 0.0}, 0.8660254037844386 * 4 / 3),
    ({"baseline": "loo", "eps": 0.0}, 0.8660254037844386 * 4 / 3),
]


@pytest.mark.parametrize(("options", "high"), GOLDEN)
def test_one_group_by_hand(options, high):
    result = advantages([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7], **options)
    torch.testing.assert_close(
        result, torch.tensor([high, -high, -high, high], dtype=torch.float64), rtol=1e-12, atol=0
    )


def test_the_documented_default_is_the_value_users_know():
    # 0.5 / (0.5773503 + 0.0001) = 0.8658754
    assert advantages([1.0, 0.0, 0.0, 1.0], [0] * 4)[0].item() == pytest.approx(0.8658754, abs=1e-7)


def test_unequal_interleaved_groups_by_hand():
    # Group 5: rewards 3, 1 (rows 0, 2): mean 2, squares 1 + 1 = 2, std sqrt(2 / 1): +-1 / sqrt(2).
    # Group 2: rewards 0, 0, 6 (rows 1, 3, 4): mean 2, squares 4 + 4 + 16 = 24, std sqrt(24 / 2) = 3.4641016:
    #   -2 / 3.4641016 = -0.5773503 twice and 4 / 3.4641016 = 1.1547005.
    result = advantages([3.0, 0.0, 1.0, 0.0, 6.0], [5, 2, 5, 2, 2], eps=0.0)
    expected = [math.sqrt(0.5), -1 / math.sqrt(3), -math.sqrt(0.5), -1 / math.sqrt(3), 2 / math.sqrt(3)]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_batch_scale_by_hand():
    # Groups (1, 0) and (5, 1): centred +-0.5 and +-2; squares 2 x 0.25 + 2 x 4 = 8.5; std over 4 rows, ddof 1:
    # sqrt(8.5 / 3) = 1.6832508.
    result = advantages([1.0, 0.0, 5.0, 1.0], [0, 0, 1, 1], scale="batch", eps=0.0)
    std = math.sqrt(8.5 / 3)
    torch.testing.assert_close(
        result, torch.tensor([0.5, -0.5, 2.0, -2.0], dtype=torch.float64) / std, rtol=1e-12, atol=0
    )


def test_leave_one_out_is_the_mean_of_the_others():
    # Rewards 1, 2, 6: 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5.
    result = advantages([1.0, 2.0, 6.0], [0, 0, 0], baseline="loo", scale="none")
    torch.testing.assert_close(result, torch.tensor([-3.0, -1.5, 4.5], dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", ["std", "batch", "none"])
def test_invalid_rows_count_in_no_statistic_and_get_zero(scale):
    valid = torch.tensor([True, True, False, True, True, True, False])
    result = advantages(
        [1.0, 0.0, math.nan, 0.0, 1.0, 3.0, math.inf], [0, 0, 0, 0, 1, 1, 1], scale=scale, valid_C=valid
    )
    alone = advantages([1.0, 0.0, 0.0, 1.0, 3.0], [0, 0, 0, 1, 1], scale=scale)
    assert result[~valid].tolist() == [0.0, 0.0]
    assert torch.equal(result[valid], alone)


def test_a_group_with_one_valid_row_has_no_advantage():
    valid = torch.tensor([True, False, True, True])
    result = advantages([5.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], valid_C=valid)
    assert result[0].item() == 0.0
    assert result[3].item() > 0


def test_equal_rewards_give_exactly_zero_though_their_mean_is_rounded():
    # 0.1 + 0.2 - 0.3 is 5.6e-17, not 0: without the tolerance a std of 1e-17 plus a small eps would blow it up.
    result = advantages([0.1 + 0.2, 0.3, 0.3], [0, 0, 0], eps=0.0)
    assert result.tolist() == [0.0, 0.0, 0.0]


def test_the_tolerance_is_relative_to_large_rewards():
    big = 1e9
    assert advantages([big, big + 1, big], [0, 0, 0]).tolist() == [0.0, 0.0, 0.0]
    assert advantages([big, big + 1, big], [0, 0, 0], tolerance=1e-12)[1].item() > 1.0


def test_small_rewards_above_the_tolerance_count():
    assert advantages([1e-5, 0.0], [0, 0], eps=0.0)[0].item() == pytest.approx(math.sqrt(0.5))


def test_dtype_follows_the_rewards():
    groups = torch.tensor([0, 0])
    assert group_advantages(torch.tensor([1.0, 0.0]), groups).dtype == torch.float32
    assert group_advantages(torch.tensor([1, 0]), groups).dtype == torch.float32
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), groups).dtype == torch.float64


def test_a_group_of_one_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"Group 9 has one completion.*at least 2"):
        advantages([1.0, 0.0, 1.0], [3, 3, 9])


def test_a_nan_reward_is_refused_by_row():
    with pytest.raises(RewardError, match="completion 1 is nan"):
        advantages([1.0, math.nan], [0, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "sdt"}, "did you mean std"),
        ({"ddof": 2}, "ddof is 2"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"baseline": "loo", "adv_scale": "loo"}, "the same correction twice"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        advantages([1.0, 0.0], [0, 0], **options)


OPTIONS = st.fixed_dictionaries(
    {
        "scale": st.sampled_from(["std", "batch", "none"]),
        "ddof": st.sampled_from([0, 1]),
        "baseline_and_scale": st.sampled_from([("mean", "none"), ("mean", "loo"), ("loo", "none")]),
        "eps": st.sampled_from([0.0, 1e-4]),
    }
).map(lambda o: {**o, "baseline": o["baseline_and_scale"][0], "adv_scale": o["baseline_and_scale"][1]})
GROUPS = st.lists(st.lists(st.integers(-8, 8), min_size=2, max_size=9), min_size=1, max_size=6)


def flat(groups):
    rewards = torch.tensor([float(r) for g in groups for r in g], dtype=torch.float64)
    ids = torch.tensor([i for i, g in enumerate(groups) for _ in g])
    return rewards, ids


def call(rewards, ids, options, **more):
    return group_advantages(rewards, ids, **{k: v for k, v in options.items() if k != "baseline_and_scale"}, **more)


def plain_advantages(groups, valid, options):
    """The formulas of the docstring in plain Python, one completion at a time."""
    kept = [[r for r, v in zip(g, vs, strict=True) if v] for g, vs in zip(groups, valid, strict=True)]
    centred = [[r - statistics.fmean(k) for r in k] for k in kept]
    if options["baseline"] == "loo":
        centred = [[c * len(k) / max(len(k) - 1, 1) for c in cs] for cs, k in zip(centred, kept, strict=True)]
    everything = [c for cs in centred for c in cs]
    result = []
    for group, vs, k in zip(groups, valid, kept, strict=True):
        for reward, is_valid in zip(group, vs, strict=True):
            if not is_valid or len(set(k)) < 2:
                result.append(0.0)
                continue
            mean = statistics.fmean(k)
            others = (sum(k) - reward) / (len(k) - 1)
            value = reward - (others if options["baseline"] == "loo" else mean)
            if options["scale"] == "std":
                value /= math.sqrt(sum((r - mean) ** 2 for r in k) / (len(k) - options["ddof"])) + options["eps"]
            elif options["scale"] == "batch":
                value /= (
                    math.sqrt(sum(c * c for c in everything) / (len(everything) - options["ddof"])) + options["eps"]
                )
            result.append(value * len(k) / (len(k) - 1) if options["adv_scale"] == "loo" else value)
    return result


@settings(max_examples=150, deadline=None)
@given(GROUPS, OPTIONS, st.randoms(use_true_random=False))
def test_any_combination_of_options_equals_the_plain_formula(groups, options, rng):
    rewards, ids = flat(groups)
    valid = [[rng.random() < 0.8 for _ in group] for group in groups]
    result = call(rewards, ids, options, valid_C=torch.tensor([v for vs in valid for v in vs]))
    assert result.tolist() == pytest.approx(plain_advantages(groups, valid, options), rel=1e-12, abs=1e-13)


@settings(max_examples=60, deadline=None)
@given(GROUPS, OPTIONS, st.randoms(use_true_random=False))
def test_order_and_names_of_groups_do_not_matter(groups, options, rng):
    rewards, ids = flat(groups)
    order = list(range(len(rewards)))
    rng.shuffle(order)
    names = torch.tensor(rng.sample(range(1000), len(groups)))
    shuffled = call(rewards[order], names[ids][order], options)
    torch.testing.assert_close(shuffled, call(rewards, ids, options)[order], rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(GROUPS, OPTIONS, st.lists(st.integers(-100, 100), min_size=6, max_size=6))
def test_a_constant_added_to_a_groups_rewards_changes_nothing(groups, options, shifts):
    rewards, ids = flat(groups)
    shifted = rewards + torch.tensor(shifts, dtype=torch.float64)[ids]
    torch.testing.assert_close(call(shifted, ids, options), call(rewards, ids, options), rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(GROUPS, OPTIONS)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(groups, options):
    rewards, ids = flat(groups)
    result = call(rewards, ids, options)
    assert torch.isfinite(result).all()
    for i, group in enumerate(groups):
        own = result[ids == i]
        assert own.sum().item() == pytest.approx(0.0, abs=1e-9)
        assert (own == 0).all() == (len(set(group)) == 1)
        assert [sorted(group).index(r) for r in group] == [sorted(own.tolist()).index(a) for a in own.tolist()]


@settings(max_examples=40, deadline=None)
@given(GROUPS, st.floats(0.5, 64))
def test_scaling_by_std_forgets_the_unit_of_the_rewards(groups, factor):
    rewards, ids = flat(groups)
    options = {"scale": "std", "eps": 0.0}
    torch.testing.assert_close(call(rewards * factor, ids, options), call(rewards, ids, options), rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(GROUPS)
def test_leave_one_out_equals_the_rescaled_mean_baseline(groups):
    rewards, ids = flat(groups)
    loo = call(rewards, ids, {"scale": "none", "baseline": "loo"})
    scaled = call(rewards, ids, {"scale": "none", "adv_scale": "loo"})
    torch.testing.assert_close(loo, scaled, rtol=1e-12, atol=1e-12)
    for i, row in enumerate(ids):
        others = rewards[(ids == row) & (torch.arange(len(ids)) != i)]
        assert loo[i].item() == pytest.approx((rewards[i] - others.mean()).item(), abs=1e-9)
