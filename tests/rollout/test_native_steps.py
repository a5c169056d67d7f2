"""Decode steps in one native call against the path through ``batch.py``: the same bits, alone and several at a time."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sagc_fast import RolloutEngine, SamplingParams, ops
from sagc_fast.ops.backend import native_module
from sagc_fast.rollout import model_runner
from sagc_fast.rollout.noise import uniforms
from sagc_fast.rollout.plan import StepPlan

pytestmark = [
    pytest.mark.skipif(
        native_module() is None or not ops.has_decoder("cpu", torch.float32, torch.float32),
        reason="sagc_fast._C is not built, or SAGC_BACKEND asks for another backend",
    ),
    pytest.mark.usefixtures("tiny_models_draft"),
]

CLOCKED = {"total_seconds", "prefill_seconds", "decode_seconds", "sample_seconds", "host_seconds", "draft_gain_seconds"}
uint64, uint32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)


@given(keys=st.lists(st.tuples(uint64, uint64, uint32, uint32), min_size=1, max_size=20))
def test_native_noise_is_that_of_the_reference(keys):
    columns = [np.array(column, dtype=np.uint64) for column in zip(*keys, strict=True)]
    drawn = native_module().keyed_uniforms(*(torch.from_numpy(column.view(np.int64)) for column in columns))
    assert drawn.tolist() == uniforms(*columns).tolist()


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.0]),
    max_new_tokens=st.integers(1, 40),
    seed=st.sampled_from([0, 3, 2**64 - 1]),
    stop_token_ids=st.sampled_from([(), (3,), tuple(range(30))]),
    ignore_eos=st.booleans(),
    top_k=st.sampled_from([0] * 8 + [5]),
)


@st.composite
def calls(draw):
    prompts = draw(st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=40), min_size=1, max_size=3))
    params = [draw(st.lists(params_strategy, min_size=1, max_size=6)) for _ in prompts]
    block_size = draw(st.sampled_from([4, 16]))
    lengths = [len(p) + one.max_new_tokens for p, group in zip(prompts, params, strict=True) for one in group]
    return {
        "prompts": prompts,
        "params": params,
        "num_blocks": -(-max(lengths) // block_size) + draw(st.integers(0, sum(lengths) // block_size)),
        "settings": {
            "block_size": block_size,
            "max_num_seqs": draw(st.integers(1, 16)),
            "max_batch_tokens": draw(st.integers(16, 80)),
            "speculation": draw(st.sampled_from(["fixed", "off"])),
        },
    }


@pytest.fixture(scope="module", params=["llama fp32", "qwen3 fp32", "qwen2 bf16"])
def model(request, tiny_model):
    family, dtype = request.param.split()
    return tiny_model(family, seed=3, dtype=dtype)


@given(case=calls(), most_steps=st.integers(2, 40))
@settings(
    max_examples=12,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_number_of_steps_in_a_call_gives_the_same_bits_and_counts(
    model, helpers, engine_with_blocks, case, most_steps
):
    results = []
    for steps in (most_steps, 1, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_runner, "MOST_STEPS", steps or 1)
            if steps is None:
                patch.setattr(StepPlan, "is_decode_only", property(lambda _: False))
            engine = engine_with_blocks(model, case["num_blocks"], **case["settings"])
            groups = engine.generate(case["prompts"], [len(p) for p in case["params"]], case["params"])
        counts = {name: value for name, value in asdict(engine.stats).items() if name not in CLOCKED}
        places = [[(c.first_step, c.last_step) for c in group.completions] for group in groups]
        results.append((helpers.outcome(groups), counts, places))
    assert results[0] == results[1] == results[2]


def test_steps_are_made_in_few_calls_and_timed_apart(model, monkeypatch):
    calls = []

    def counted(self, slots, most_steps, stop_at_rows):
        calls.append(most_steps)
        return steps(self, slots, most_steps, stop_at_rows)

    steps = ops.Decoder.steps
    monkeypatch.setattr(ops.Decoder, "steps", counted)
    engine = RolloutEngine(model, speculation="off")
    longest = model_runner.MOST_STEPS
    engine.generate([[5, 6, 7]], 4, SamplingParams(max_new_tokens=longest + 8, ignore_eos=True))
    assert calls == [longest, 7]  # the first token comes from the prompt
    assert engine.stats.num_steps == longest + 8 > 16
    assert min(engine.stats.decode_seconds, engine.stats.sample_seconds) > 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_computed", 10_000, "beyond its table of blocks"),
        ("num_computed", -1, "slot 0 would reach"),
        ("block_tables", 10_000, "names block 10000"),
        ("last_token", -3, "token id 0 is -3"),
        ("end_set", 9, "slot 0 names set 9 of ending ids"),
    ],
)
def test_a_broken_row_table_is_an_error_and_not_a_crash(model, monkeypatch, name, value, message):
    def broken(self, slots, most_steps, stop_at_rows):
        getattr(rows[0], name)[slots] = value
        return steps(self, slots, most_steps, stop_at_rows)

    rows, steps = [], ops.Decoder.steps
    bound = model_runner._bound
    monkeypatch.setattr(model_runner, "_bound", lambda table, ends: (rows.append(table), bound(table, ends))[1])
    monkeypatch.setattr(ops.Decoder, "steps", broken)
    with pytest.raises(RuntimeError, match=message):
        RolloutEngine(model).generate([[5, 6, 7]], 1, SamplingParams(max_new_tokens=40))
