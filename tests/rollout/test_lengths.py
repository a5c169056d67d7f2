"""The length history: newest weighs half, the oldest prompt is forgotten first."""

from __future__ import annotations

import json

import numpy as np

from sagc_fast.rollout.lengths import LengthHistory


def prompt(number):
    return np.array([number, 1, 2])


def test_the_newest_group_weighs_half():
    history = LengthHistory()
    history.record(prompt(0), [10, 20])
    assert history.expected(prompt(0)) == 15
    history.record(prompt(0), [25])
    assert history.expected(prompt(0)) == 20
    assert history.expected(prompt(1)) is None


def test_the_overall_mean_moves_slowly():
    history = LengthHistory()
    assert history.overall is None
    history.record(prompt(0), [10])
    history.record(prompt(1), [20])
    assert history.overall == 11


def test_the_prompt_not_seen_for_longest_is_forgotten():
    history = LengthHistory(max_prompts=2)
    for number in (0, 1, 0, 2):
        history.record(prompt(number), [5])
    assert [history.expected(prompt(n)) for n in range(3)] == [5, None, 5]
    history.clear()
    assert len(history) == 0
    assert history.overall is None


def test_a_restored_history_goes_on_as_the_saved_one():
    first, second = LengthHistory(max_prompts=3), LengthHistory(max_prompts=3)
    for number, length in ((0, 3), (1, 10), (2, 1), (0, 8)):
        first.record(prompt(number), [length, 7, 6])
    second.record(prompt(9), [99])
    second.restore(json.loads(json.dumps(first.state())))
    for history in (first, second):
        history.record(prompt(3), [1 / 3])
    assert second.state() == first.state()
    assert [second.expected(prompt(n)) is None for n in range(4)] == [False, True, False, False]
