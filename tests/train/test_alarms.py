"""Alarms: raised when a run cannot be learning, once per cause, naming the likely reason."""

from __future__ import annotations

import pytest

from sagc_fast.train.alarms import PATIENCE, Alarms, diagnose

CALM = {
    "num_completions_sampled": 12,
    "num_reward_errors": 0,
    "clipped_ratio": 0.1,
    "length_max": 64,
    "outcome_mean": 0.5,
    "reward_mean": 0.5,
    "reward_std": 0.4,
    "logprob_diff_mean": 1e-6,
}


def run(alarms, record, steps=PATIENCE, informative=0, error=None):
    for _ in range(steps):
        alarms.check({**CALM, **record}, informative, error)


def test_a_run_that_learns_raises_nothing(caplog):
    run(Alarms(0.05), {}, steps=10, informative=3)
    assert not caplog.records


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"clipped_ratio": 1.0, "outcome_mean": 0.0, "reward_std": 0.0}, "raise rollout.max_new_tokens"),
        ({"outcome_mean": 0.0, "reward_std": 0.0, "reward_mean": 0.0}, "no completion is judged correct"),
        ({"outcome_mean": 1.0, "reward_std": 0.0, "reward_mean": 1.0}, "every completion is correct"),
        ({"reward_std": 0.0, "outcome_mean": 0.5}, "the same reward"),
        ({}, "completions of a prompt all get the same reward"),
    ],
)
def test_no_signal_names_the_likely_cause(caplog, record, words):
    alarms = Alarms(0.05)
    run(alarms, record, steps=PATIENCE - 1)
    assert not caplog.records, "a single step without signal is chance"
    run(alarms, record, steps=20)
    assert len(caplog.records) == 1, "once per cause"
    assert words in caplog.text
    assert words in diagnose({**CALM, **record})[1]


def test_another_cause_is_another_alarm(caplog):
    alarms = Alarms(0.05)
    run(alarms, {"outcome_mean": 1.0})
    run(alarms, {"clipped_ratio": 1.0})
    assert len(caplog.records) == 2


def test_scorers_that_all_fail_are_said_at_once_with_an_example(caplog):
    run(Alarms(0.05), {"num_reward_errors": 12}, steps=1, error="raise: ValueError: no reward today")
    assert "no reward today" in caplog.text


def test_log_probs_that_drift_apart(caplog):
    alarms = Alarms(0.05)
    run(alarms, {"logprob_diff_mean": 0.2}, informative=1)
    assert "differ by 0.2" in caplog.text
    assert len(caplog.records) == 1
    run(alarms, {"logprob_diff_mean": None}, informative=1)


def test_a_resumed_run_does_not_repeat_itself(caplog):
    alarms = Alarms(0.05)
    run(alarms, {"outcome_mean": 1.0}, steps=PATIENCE - 1)
    alarms = Alarms(0.05, alarms.state_dict())
    run(alarms, {"outcome_mean": 1.0}, steps=1)
    assert len(caplog.records) == 1
    run(Alarms(0.05, alarms.state_dict()), {"outcome_mean": 1.0})
    assert len(caplog.records) == 1
