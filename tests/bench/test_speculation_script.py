"""The script that measures drafts, on a small model: it reaches into the engine, which must not move away under it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from sagc_fast import SamplingParams
from sagc_fast.rollout import step_cost
from sagc_fast.rollout.speculation import Speculator


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    return importlib.import_module("bench_speculation")


def test_rollouts_with_and_without_drafts_are_compared_and_the_engine_is_left_as_it_was(
    script, tiny_model, monkeypatch
):
    monkeypatch.setattr(step_cost, "HOST_SECONDS_IN_BURSTS", step_cost.HOST_SECONDS)  # else drafts do not pay here
    monkeypatch.setattr(step_cost, "PLAN_SECONDS", 0.0)
    before = dict(vars(Speculator))
    params = lambda seed: SamplingParams(max_new_tokens=48, temperature=0.3, ignore_eos=True, seed=seed)  # noqa: E731
    workload = script.Workload(tiny_model("llama", seed=3), None, [[5, 6, 7] * 4], 3, params)
    figures = script.compare(workload, "fixed", repeat=1, recall_mb=0)
    assert figures["is_identical"]
    assert figures["oracle_accepted"] == 1.0
    assert figures["tail_gain"] > 0
    assert dict(vars(Speculator)) == before
