"""Whole rollouts at every narrower instruction set than this CPU's best, and without compiled operators at all.

The rest of tests/rollout runs at the best level. `SAGC_CPU_LEVEL=avx2 pytest tests/rollout` runs all of it at another
one; this is the part that every run of the suite can afford.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sagc_fast import ops
from sagc_fast.ops.backend import native_module
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.types import SamplingParams

PROMPTS = [[5, 6, 7], list(range(40, 77)), [9] * 16, [250, 1, 30, 4]]
SIZES = [3, 2, 4, 1]
PARAMS = SamplingParams(max_new_tokens=20, seed=11)
GREEDY = SamplingParams(max_new_tokens=20, temperature=0)
LEVELS = native_module().cpu_levels()[:-1] if native_module() else ()


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set of the test's parameter, or plain torch."""
    if request.param == "torch":
        with ops.use_backend("torch"):
            yield request.param
        return
    native = native_module()
    before = native.cpu_level()
    native.set_cpu_level(request.param)
    yield request.param
    native.set_cpu_level(before)


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_completion_depends_on_nothing_but_itself(level, tiny_model, helpers, family):
    model = tiny_model(family, seed=3)
    alone = helpers.outcome(RolloutEngine(model, max_num_seqs=1).generate(PROMPTS, SIZES, PARAMS))
    for settings in ({}, {"max_num_seqs": 7, "max_batch_tokens": 8}, {"block_size": 32, "threads": 2}):
        assert helpers.outcome(RolloutEngine(model, **settings).generate(PROMPTS, SIZES, PARAMS)) == alone


@pytest.fixture(scope="module")
def greedy_at_best(tiny_model):
    return RolloutEngine(tiny_model("llama", seed=3)).generate(PROMPTS, 1, GREEDY)


@pytest.mark.parametrize("level", [*LEVELS, "torch"], indirect=True)
def test_greedy_tokens_are_those_of_the_best_level(greedy_at_best, level, tiny_model):
    """Levels differ by rounding and by nothing else."""
    here = RolloutEngine(tiny_model("llama", seed=3)).generate(PROMPTS, 1, GREEDY)
    for group, wanted in zip(here, greedy_at_best, strict=True):
        assert group.completions[0].token_ids == wanted.completions[0].token_ids
        logprobs, expected = (torch.tensor(g.completions[0].logprobs) for g in (group, wanted))
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
