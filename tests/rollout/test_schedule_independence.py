"""A completion is the same, bit for bit, whatever the schedule: fuzzed against the one-at-a-time reference."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sagc_fast.rollout import call, step_cost
from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.types import SamplingParams

pytestmark = pytest.mark.usefixtures("tiny_models_draft")

CONTEXT = 40
SETTINGS = ("block_size", "max_num_seqs", "max_batch_tokens", "speculation", "draft_recall_mb")


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """The stand-ins have steps of microseconds, in which drafts would not pay for the host's work."""
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS", 1e-9)
    monkeypatch.setattr(step_cost, "DRAFT_SECONDS_PER_ROW", 0.0)


@pytest.fixture
def managers(monkeypatch):
    """Every BlockManager that calls made, to see afterwards that all blocks came back."""
    made = []

    class Recorded(BlockManager):
        def __init__(self, num_blocks):
            super().__init__(num_blocks)
            made.append(self)

    monkeypatch.setattr(call, "BlockManager", Recorded)
    return made


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.0, 1.8]),
    max_new_tokens=st.integers(1, 25),
    seed=st.integers(0, 3),
    stop=st.sampled_from([(), (), ("BC", "D"), ("FGA",)]),
    stop_token_ids=st.sampled_from([(), (3,), (3, 9)]),
    ignore_eos=st.booleans(),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
)


@st.composite
def calls(draw):
    prompts = draw(st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=CONTEXT - 1), min_size=1, max_size=4))
    params = [draw(st.lists(params_strategy, min_size=1, max_size=5)) for _ in prompts]
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    lengths = [(len(p), one.max_new_tokens) for p, group in zip(prompts, params, strict=True) for one in group]
    largest = max(math.ceil((min(length + new, CONTEXT) - 1) / block_size) for length, new in lengths)
    total = sum(math.ceil((length + new) / block_size) for length, new in lengths)
    return {
        "prompts": prompts,
        "params": params,
        "block_size": block_size,
        "num_blocks": largest + draw(st.integers(0, max(1, total // draw(st.sampled_from([1, 4, 16]))))),
        "max_num_seqs": draw(st.integers(1, 12)),
        "max_batch_tokens": draw(st.integers(1, 70)),
        "speculation": draw(st.sampled_from(["fixed", "fixed", "auto", "off"])),
        "draft_recall_mb": draw(st.sampled_from([0, 0, 0.0001, 1])),
        "model": draw(st.sampled_from([(None, 1.0), (2, 1.0), (2, 4.0), (1, 8.0)])),
    }


@given(case=calls())
@settings(
    max_examples=40,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking would take minutes; the failing case is printed whole
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_schedule_gives_the_tokens_and_logprobs_of_the_reference(case, helpers, engine_with_blocks, managers):
    model = helpers.Model(CONTEXT, *case["model"])
    prompts, params = case["prompts"], case["params"]
    engine = engine_with_blocks(
        model,
        case["num_blocks"],
        tokenizer=helpers.Tokenizer(),
        **{name: case[name] for name in SETTINGS},
    )
    ids = [10 * index + 5 for index in range(len(prompts))]
    sizes = [len(p) for p in params]
    if case["draft_recall_mb"]:
        engine.generate(prompts, sizes, params, prompt_ids=ids)  # what it recalls from here must change nothing
    managers.clear()
    model.num_tokens = 0
    complete = []
    groups = engine.generate(prompts, sizes, params, prompt_ids=ids, on_group=complete.append)
    expected = [
        [helpers.sample_alone(model, prompt, prompt_id, sample, one) for sample, one in enumerate(group)]
        for prompt, prompt_id, group in zip(prompts, ids, params, strict=True)
    ]
    assert helpers.outcome(groups) == expected
    assert sorted(complete, key=lambda g: g.prompt_index) == groups

    stats, (blocks,) = engine.stats, managers
    assert blocks.num_free == blocks.num_blocks <= case["num_blocks"]
    assert not blocks.refcounts.any()
    assert sum(stats.active_rows) + stats.num_accepted_tokens == stats.num_output_tokens
    assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
    assert case["speculation"] != "off" or stats.num_draft_tokens == 0
    assert stats.num_prefill_tokens == stats.num_prompt_tokens + stats.num_recomputed_tokens
    # The model computes the prefill, every sampled token except each completion's last, and drafts for nothing.
    num_rejected = stats.num_draft_tokens - stats.num_accepted_tokens
    assert model.num_tokens == stats.num_prefill_tokens + stats.num_output_tokens - stats.num_completions + num_rejected
    assert model.largest_step <= case["max_batch_tokens"]
    assert max(stats.active_rows) <= stats.capacity_rows <= case["max_num_seqs"]


def test_preemption_under_a_tight_budget_changes_nothing(helpers, engine_with_blocks):
    """A pool for a third of the batch: sequences are sent back, recomputed, and end up the same."""
    model = helpers.Model(128)
    prompts = [[5] * 21, [6] * 3, [7] * 34]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    roomy = engine_with_blocks(model, 10_000, block_size=4)
    expected = helpers.outcome(roomy.generate(prompts, 6, params))
    tight = engine_with_blocks(model, roomy.stats.kv_blocks_peak // 3, block_size=4)
    assert helpers.outcome(tight.generate(prompts, 6, params)) == expected
    assert roomy.stats.num_preemptions == 0
    assert roomy.stats.num_prefill_tokens == 21 + 3 + 34
    assert tight.stats.num_preemptions > 0
    assert tight.stats.num_recomputed_tokens > 0
    assert tight.stats.kv_blocks_peak <= roomy.stats.kv_blocks_peak // 3


def test_pool_of_exactly_one_sequence_serves_a_whole_group(helpers, engine_with_blocks):
    model = helpers.Model(128)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine = engine_with_blocks(model, math.ceil((10 + 30 - 1) / 4), block_size=4)
    expected = [helpers.sample_alone(model, [3] * 10, 0, sample, params) for sample in range(5)]
    assert helpers.outcome(engine.generate([[3] * 10], 5, params)) == [expected]


def test_larger_group_begins_with_the_smaller_one(helpers):
    from sagc_fast.rollout.engine import RolloutEngine

    engine = RolloutEngine(helpers.Model())
    small, large = (helpers.outcome(engine.generate([[1, 2], [3]], size)) for size in ([4, 4], [16, 9]))
    assert [group[:4] for group in large] == small
