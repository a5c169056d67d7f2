"""Named algorithms, options put over them, and refusals that name the remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sagc_fast.algo.config import ALGORITHMS, CISPO, DAPO, DR_GRPO, GRPO, GSPO, LossConfig, make_algorithm
from sagc_fast.errors import ConfigError


def test_presets_are_the_papers():
    assert (GRPO.clip_low, GRPO.clip_high, GRPO.aggregation, GRPO.kl_beta) == (0.2, 0.2, "sequence", 0.0)
    assert (DR_GRPO.aggregation, ALGORITHMS["dr_grpo"].advantage.scale) == ("constant", "none")
    assert (DAPO.clip_low, DAPO.clip_high, DAPO.aggregation) == (0.2, 0.28, "token")
    assert ALGORITHMS["dapo"].filters.dynamic_sampling
    assert ALGORITHMS["dapo"].filters.overlong_cache_fraction == 0.2
    assert (GSPO.ratio_level, GSPO.clip_low, GSPO.clip_high) == ("sequence", 3e-4, 4e-4)
    assert (CISPO.objective, 1 - CISPO.clip_low, 1 + CISPO.clip_high) == ("cispo", 0.0, 5.0)
    assert ALGORITHMS["rloo"].advantage.baseline == "loo"


def test_options_lie_over_the_named_set_whichever_record_they_belong_to():
    algorithm = make_algorithm({"name": "dapo", "clip_high": 0.3, "adv_scale": "loo", "dynamic_sampling": False})
    assert algorithm.loss == LossConfig(clip_low=0.2, clip_high=0.3, aggregation="token")
    assert algorithm.advantage.adv_scale == "loo"
    assert not algorithm.filters.dynamic_sampling
    assert ALGORITHMS["dapo"].loss.clip_high == 0.28


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "grop"}, "did you mean grpo"),
        ({"name": ["grpo"]}, r"algo.name is \['grpo'\]; it must be one of"),
        ({"clip_hgh": 0.3}, "did you mean clip_high"),
        ({"clip_low": -0.1}, "algo.clip_low is -0.1"),
        ({"clip_low": "0.2"}, "algo.clip_low is '0.2'"),
        ({"aggregation": "tokens"}, "did you mean token"),
        ({"dual_clip": 0.9}, "dual_clip is 0.9; it must be above 1"),
        ({"name": "cispo", "dual_clip": 3.0}, "no minimum to bound"),
        ({"rollout_is_cap": 0.5, "rollout_is_floor": 0.5}, "above rollout_is_floor"),
        ({"mask_truncated": 1}, "true or false"),
        ({"overlong_cache_fraction": 1.5}, "must lie in"),
        ({"kl_beta": float("nan")}, "kl_beta is nan"),
        ({"tolerance": float("inf")}, "tolerance is inf"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        make_algorithm(options)


def test_an_infinite_clip_is_no_bound_and_allowed():
    assert make_algorithm({"clip_high": float("inf")}).loss.clip_high == float("inf")


def test_options_import_no_torch():
    code = "import sys, sagc_fast.algo.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
