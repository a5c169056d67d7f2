"""Several steps under one plan give what the same steps give one by one: tokens, log-probs and every count."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sagc_fast.rollout import call
from sagc_fast.rollout.block_manager import BlockManager
from sagc_fast.rollout.model_runner import ModelRunner, StepResult
from sagc_fast.rollout.speculation import no_drafts
from sagc_fast.types import SamplingParams

pytestmark = pytest.mark.usefixtures("tiny_models_draft")

CONTEXT = 40
SECONDS = {"total_seconds", "prefill_seconds", "decode_seconds", "sample_seconds", "host_seconds", "draft_gain_seconds"}


class SteppingRunner(ModelRunner):
    """The reference of a burst: its steps one by one through the row table, which is put back afterwards."""

    max_steps = 6
    stops_at_end = True
    """Whether it returns at the first end of a row; else at the plan's word, without or with the rows that are over."""
    closes_ranks = True
    bursts = ()

    def __init__(self, *args):
        super().__init__(*args)
        self.max_steps, self.closes_ranks = type(self).max_steps, type(self).closes_ranks

    def run(self, plan):
        if plan.num_steps == 1:
            return super().run(plan)
        rows, slots = self._rows, plan.decode_slots
        names = ("num_computed", "num_output", "length", "last_token")
        before = {name: getattr(rows, name).copy() for name in names}
        is_live, results = np.ones(slots.size, dtype=bool), []
        tokens, logprobs = np.zeros((2, slots.size, plan.num_steps))
        while len(results) < plan.num_steps and (self.stops_at_end is False or is_live.all() or not results):
            is_run = is_live if self.closes_ranks else np.ones_like(is_live)
            step = replace(plan, num_steps=1, decode_slots=slots[is_run], sample_slots=slots[is_run])
            step = replace(
                step, sample_offsets=np.zeros_like(step.decode_slots), drafts=no_drafts(step.decode_slots.size)
            )
            result = super().run(step)
            plan = replace(plan, copy_sources=plan.copy_sources[:0], copy_targets=plan.copy_targets[:0])
            tokens[is_run, len(results)], logprobs[is_run, len(results)] = result.tokens, result.logprobs
            rows.num_computed[slots[is_run]] += 1
            rows.append(slots[is_run], step.sample_offsets, result.tokens, result.logprobs)
            is_over = self._ends.is_end(result.tokens, rows.end_set[slots[is_run]])
            is_live[is_run] &= ~is_over & (rows.num_output[slots[is_run]] < rows.max_output[slots[is_run]])
            results.append(result)
            if is_live.sum() <= plan.stop_at_rows:
                break
        for name in names:
            getattr(rows, name)[:] = before[name]
        self.bursts.append((plan.num_steps, len(results)))
        return StepResult(
            len(results),
            tokens[:, : len(results)].astype(np.int64).reshape(-1),
            logprobs[:, : len(results)].astype(np.float32).reshape(-1),
            *(sum(getattr(r, name) for r in results) for name in StepResult.__slots__[3:-1]),
        )


@pytest.fixture
def generate(monkeypatch, helpers, engine_with_blocks):
    """``generate(case, max_steps, ...)``: outcome, all counts and steps of the call, and its bursts."""
    managers = []

    class Recorded(BlockManager):
        def __init__(self, num_blocks):
            super().__init__(num_blocks)
            managers.append(self)

    monkeypatch.setattr(call, "BlockManager", Recorded)
    monkeypatch.setattr(call, "ModelRunner", SteppingRunner)

    def run(case, max_steps, stops_at_end=True, closes_ranks=True):
        monkeypatch.setattr(SteppingRunner, "max_steps", max_steps)
        monkeypatch.setattr(SteppingRunner, "stops_at_end", stops_at_end)
        monkeypatch.setattr(SteppingRunner, "closes_ranks", closes_ranks)
        monkeypatch.setattr(SteppingRunner, "bursts", [])
        model = helpers.Model(CONTEXT, *case["model"])
        engine = engine_with_blocks(
            model, case["num_blocks"], tokenizer=helpers.Tokenizer(), **{name: case[name] for name in case["settings"]}
        )
        groups = engine.generate(case["prompts"], [len(p) for p in case["params"]], case["params"])
        assert managers[-1].num_free == managers[-1].num_blocks
        assert not managers[-1].refcounts.any()
        counts = {name: value for name, value in asdict(engine.stats).items() if name not in SECONDS}
        steps = [[(c.first_step, c.last_step) for c in group.completions] for group in groups]
        return helpers.outcome(groups), counts, steps, SteppingRunner.bursts

    return run


@st.composite
def calls(draw):
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        max_new_tokens=st.integers(1, 30),
        seed=st.integers(0, 3),
        stop=st.sampled_from([()] * 12 + [("BC", "D")]),
        stop_token_ids=st.sampled_from([(), (3,), (3, 9)]),
        ignore_eos=st.booleans(),
        top_k=st.sampled_from([0] * 12 + [5]),
    )
    prompts = draw(st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=20), min_size=1, max_size=4))
    groups = [draw(st.lists(params, min_size=1, max_size=5)) for _ in prompts]
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    lengths = [min(len(p) + one.max_new_tokens, CONTEXT) for p, g in zip(prompts, groups, strict=True) for one in g]
    return {
        "prompts": prompts,
        "params": groups,
        "num_blocks": -(-max(lengths) // block_size)
        + draw(st.integers(0, sum(lengths) // block_size // draw(st.sampled_from([1, 4])))),
        "model": draw(st.sampled_from([(None, 1.0), (2, 1.0), (2, 4.0)])),
        "block_size": block_size,
        "max_num_seqs": draw(st.integers(1, 12)),
        "max_batch_tokens": draw(st.integers(1, 70)),
        "speculation": draw(st.sampled_from(["fixed", "off"])),
        "settings": ("block_size", "max_num_seqs", "max_batch_tokens", "speculation"),
    }


@given(case=calls(), max_steps=st.integers(2, 20))
@settings(
    max_examples=40,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_bursts_change_no_token_no_count_and_no_step(case, max_steps, generate):
    expected = generate(case, 1)[:3]
    assert generate(case, max_steps)[:3] == expected
    assert generate(case, max_steps, stops_at_end=False)[:3] == expected
    assert generate(case, max_steps, stops_at_end=False, closes_ranks=False)[:3] == expected


CASE = {
    "prompts": [[5] * 9, [6] * 3],
    "params": [
        [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (3, 9, 30)],
        [SamplingParams(max_new_tokens=30, ignore_eos=True)] * 3,
    ],
    "num_blocks": 100,
    "model": (None, 1.0),
    "block_size": 4,
    "max_num_seqs": 6,
    "max_batch_tokens": 64,
    "speculation": "off",
    "settings": ("block_size", "max_num_seqs", "max_batch_tokens", "speculation"),
}


def test_a_burst_ends_with_the_first_row_and_else_runs_on(generate):
    assert generate(CASE, 8, closes_ranks=False)[3] == [(2, 2), (6, 6), (8, 8), (8, 8), (5, 5)]


def test_a_burst_goes_on_without_the_rows_that_are_over(generate):
    assert generate(CASE, 8, stops_at_end=False)[3] == [(8, 8), (8, 8), (8, 8), (5, 5)]


def test_a_burst_ends_with_the_row_for_which_somebody_waits(generate):
    """A seventh completion waits for one of six rows until the first of them ends."""
    params = [[*CASE["params"][0], SamplingParams(max_new_tokens=20, ignore_eos=True)], CASE["params"][1]]
    bursts = generate({**CASE, "params": params}, 8, stops_at_end=False)[3]
    assert bursts[0] == (2, 2)
    assert bursts[-1][0] > 2


def test_no_burst_is_planned_that_would_need_a_preemption(generate):
    """Steps become single where memory is short, and the same rows are sent back at the same steps."""
    tight = {**CASE, "num_blocks": 30}
    assert generate(tight, 1)[1]["num_preemptions"] > 0
    assert generate(tight, 8)[:3] == generate(tight, 1)[:3]
    assert any(planned > 1 for planned, _ in generate(tight, 8)[3])


def test_rows_whose_end_the_host_must_find_are_run_step_by_step(generate):
    stop = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=["zz"])
    assert generate({**CASE, "params": [CASE["params"][0], [stop] * 3]}, 8)[3] == []


def test_bursts_are_as_short_as_the_pauses_of_the_speculator(generate):
    """On text that cannot be foreseen it looks after 1, 3, 7, 15 and then every 31 steps, and so do bursts."""
    bursts = generate({**CASE, "speculation": "fixed", "model": (None, 1.0)}, 64)[3]
    assert bursts
    assert all(planned <= 32 for planned, _ in bursts)
    assert bursts[0][0] < 8
