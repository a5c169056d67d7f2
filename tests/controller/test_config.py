"""Every value that the controller cannot use is refused in one clear sentence; surprising ones are warned about."""

from __future__ import annotations

import warnings

import pytest

from sagc_fast.controller import ControllerWarning, FixedG, SAGCConfig, advantage_scale, num_prompts
from sagc_fast.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"candidates": (1, 4)}, "1"),
        ({"candidates": ()}, "candidates"),
        ({"candidates": (8, 4)}, "not sorted"),
        ({"candidates": (4, 4, 8)}, "twice"),
        ({"candidates": (4, 8.5)}, "8.5"),
        ({"candidates": (4, True)}, "True"),
        ({"candidates": 8}, "candidates"),
        ({"candidates": "48"}, "candidates"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": float("nan")}, "delta"),
        ({"delta": "0.2"}, "delta"),
        ({"tau": 1.0}, "tau"),
        ({"tau": float("inf")}, "tau"),
        ({"eta": 0.0}, "eta"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.01}, "gamma"),
        ({"prior_alpha": 0.0}, "prior_alpha"),
        ({"prior_beta": -1.0}, "prior_beta"),
        ({"lambda_0": -1.0}, "lambda_0"),
        ({"lambda_0": 21.0}, "lambda_0"),
        ({"lambda_max": 0.0}, "lambda_max"),
        ({"radius": 0}, "radius"),
        ({"dwell": 0}, "dwell"),
        ({"dwell": 1.5}, "dwell"),
        ({"start": 5}, "start"),
        ({"signal": "some"}, "signal"),
        ({"ratio": "mean"}, "ratio"),
        ({"fallback": 1}, "fallback"),
        ({"hold": "time"}, "hold"),
        ({"adv_scale": "std"}, "adv_scale"),
        ({"max_length": 0}, "max_length"),
    ],
)
def test_an_unusable_value_is_named_in_one_sentence(options, named):
    with pytest.raises(ConfigError) as caught:
        SAGCConfig(**options)
    message = str(caught.value)
    assert named in message
    assert message.startswith("SAGCConfig.")
    assert message.endswith(".")
    assert "\n" not in message


def test_candidates_may_be_any_sequence_of_integers():
    numpy = pytest.importorskip("numpy")
    assert SAGCConfig(candidates=[3, 6, 12]).candidates == (3, 6, 12)
    assert SAGCConfig(candidates=list(numpy.array([4, 8]))).candidates == (4, 8)
    assert SAGCConfig(candidates=(5,)).candidates == (5,)


def test_a_group_of_two_that_cannot_straggle_is_warned_about():
    with pytest.warns(ControllerWarning, match="G=2 cannot straggle"):
        SAGCConfig(candidates=(2, 4), tau=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SAGCConfig(candidates=(2, 4), tau=1.8)
        SAGCConfig(candidates=(2, 4), tau=2.0, ratio="reference")
        SAGCConfig(candidates=(3, 4), tau=2.0)
        FixedG(2)


@pytest.mark.parametrize("group_size", [1, 0, 2.5, True, "4"])
def test_fixed_g_refuses_what_is_not_a_group(group_size):
    with pytest.raises(ConfigError, match="FixedG"):
        FixedG(group_size)


@pytest.mark.parametrize(
    ("hold", "budget", "expected"),
    [("prompts", 32, [32, 32, 32]), ("completions", 256, [64, 32, 16]), ("tokens", 25_600, [64, 32, 16])],
)
def test_num_prompts_follows_what_is_held(hold, budget, expected):
    assert [num_prompts(hold, budget, size, mean_length=100.0) for size in (4, 8, 16)] == expected


def test_num_prompts_is_at_least_one_and_refuses_nonsense():
    assert num_prompts("completions", 3, 16) == 1
    with pytest.raises(ConfigError, match="hold is 'rows'"):
        num_prompts("rows", 8, 4)
    with pytest.raises(ConfigError, match="budget"):
        num_prompts("prompts", 0, 4)
    with pytest.raises(ConfigError, match="mean_length"):
        num_prompts("tokens", 1000, 4)


def test_loo_undoes_the_shrinkage_of_a_mean_that_includes_the_sample():
    """For rewards r with group mean m: (r_i - m) G/(G-1) equals r_i minus the mean of the others."""
    rewards = [1.0, 0.0, 0.0, 3.0]
    mean, others = sum(rewards) / 4, (sum(rewards) - rewards[0]) / 3
    assert (rewards[0] - mean) * advantage_scale("loo", 4) == pytest.approx(rewards[0] - others)
    assert advantage_scale("none", 4) == 1.0
    with pytest.raises(ConfigError, match="adv_scale"):
        advantage_scale("mean", 4)
