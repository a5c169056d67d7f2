"""With real (tiny) models in fp32: the bits of a completion do not depend on anything but its own key and prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.types import SamplingParams

PROMPTS = [[5, 6, 7], list(range(40, 77)), [9] * 16, [250, 1, 30, 4]]
SIZES = [3, 2, 4, 1]
PARAMS = SamplingParams(max_new_tokens=24, seed=11)
FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tiny_model):
    return tiny_model(request.param, seed=3)


@pytest.fixture(scope="module")
def alone(model, helpers):
    """Each completion sampled one at a time, each prompt prefilled whole."""
    return helpers.outcome(RolloutEngine(model, max_num_seqs=1).generate(PROMPTS, SIZES, PARAMS))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 3},
        {"max_num_seqs": 7, "max_batch_tokens": 8},
        {"max_num_seqs": 4, "max_batch_tokens": 4},
        {"max_num_seqs": 1, "max_batch_tokens": 1},
        {"max_num_seqs": 5, "max_batch_tokens": 15},
        {"block_size": 4},
        {"block_size": 32, "max_batch_tokens": 33},
    ],
)
def test_rows_chunks_and_block_size_change_no_bit(model, alone, helpers, settings):
    assert helpers.outcome(RolloutEngine(model, **settings).generate(PROMPTS, SIZES, PARAMS)) == alone


@pytest.mark.parametrize("num_blocks", [9, 12])
def test_preemption_changes_no_bit(model, alone, helpers, engine_with_blocks, num_blocks):
    params = replace(PARAMS, ignore_eos=True)
    roomy = helpers.outcome(RolloutEngine(model).generate(PROMPTS, SIZES, params))
    engine = engine_with_blocks(model, num_blocks, block_size=8, max_batch_tokens=16)
    assert helpers.outcome(engine.generate(PROMPTS, SIZES, params)) == roomy
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_recomputed_tokens > 0


def test_order_of_prompts_and_other_groups_sizes_change_no_bit(model, alone, helpers):
    order = [2, 0, 3, 1]
    groups = RolloutEngine(model).generate(
        [PROMPTS[i] for i in order], [SIZES[i] + 2 * (i == 0) for i in order], PARAMS, prompt_ids=order
    )
    shuffled = dict(zip(order, helpers.outcome(groups), strict=True))
    assert [shuffled[i][: SIZES[i]] for i in range(4)] == alone


def test_filters_and_greedy_rows_beside_it_change_no_bit(model, alone, helpers):
    others = [replace(PARAMS, top_k=5), replace(PARAMS, temperature=0.0), replace(PARAMS, temperature=0.5, top_p=0.7)]
    params = [[PARAMS] * size + others for size in SIZES]
    mixed = helpers.outcome(RolloutEngine(model).generate(PROMPTS, [size + 3 for size in SIZES], params))
    assert [group[:size] for group, size in zip(mixed, SIZES, strict=True)] == alone


def test_two_threads_change_nothing_between_one_row_and_many(tiny_model, helpers):
    """A vocabulary wide enough for a reduction over one row to be split between threads."""
    model = tiny_model("llama", seed=4, vocab_size=70_000)
    params = SamplingParams(max_new_tokens=6)
    single = RolloutEngine(model, max_num_seqs=1, threads=2).generate(PROMPTS, 4, params)
    batched = RolloutEngine(model, threads=2).generate(PROMPTS, 4, params)
    assert helpers.outcome(single) == helpers.outcome(batched)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logprobs_are_those_of_the_plain_forward_pass(tiny_model, dtype):
    """Teacher forcing with the training path's forward. bf16 rounds at 2**-8 in other places there."""
    model = tiny_model("llama", seed=5, dtype=dtype)
    params = SamplingParams(max_new_tokens=30, temperature=0.8, ignore_eos=True)
    for group in RolloutEngine(model).generate(PROMPTS, 3, params):
        for completion in group.completions:
            tokens = torch.tensor(group.prompt_token_ids + completion.token_ids)
            with torch.no_grad():
                logits = model.forward_dense(tokens)[len(group.prompt_token_ids) - 1 : -1]
            expected = torch.log_softmax(logits / 0.8, -1).gather(1, tokens[len(group.prompt_token_ids) :, None])[:, 0]
            error = (expected - torch.tensor(completion.logprobs)).abs()
            assert error.max() < (1e-4 if dtype == "fp32" else 0.15)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"), [("fp32", "bf16", 0.1), ("fp32", "fp16", 0.01), ("bf16", "fp32", 1)]
)
def test_kv_dtypes_keep_the_first_tokens_close(tiny_model, dtype, kv_dtype, bound):
    """First tokens have the same KV in either engine up to rounding, so their log-probs can be compared."""
    model = tiny_model("llama", seed=6, dtype=dtype)
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    wide = RolloutEngine(model).generate(PROMPTS, 8, params)
    narrow_engine = RolloutEngine(model, kv_dtype=kv_dtype)
    narrow = narrow_engine.generate(PROMPTS, 8, params)
    for one, other in zip(wide, narrow, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            if a.token_ids[0] == b.token_ids[0]:
                assert abs(a.logprobs[0] - b.logprobs[0]) < bound
    element = 4 if kv_dtype == "fp32" else 2
    assert narrow_engine.bytes_per_block() == 2 * 2 * 2 * 16 * 8 * element
