"""Which problems are passed over, and for how long."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.algo.config import FilterConfig
from sagc_fast.errors import ConfigError
from sagc_fast.train.prompt_history import PromptHistory


def test_completions_count_one_by_one_over_groups_of_any_size():
    history = PromptHistory(skip_after=6, skip_times=2)
    history.observe(7, [False] * 4)
    assert not history.passes_over(7)
    history.observe(7, [False] * 2)
    assert [history.passes_over(7) for _ in range(4)] == [True, True, False, False]
    history.observe(7, [False] * 2)
    assert history.passes_over(7), "still hopeless: passed over again at once"


def test_one_of_another_outcome_clears_a_problem():
    history = PromptHistory(skip_after=4, skip_times=1)
    history.observe(1, [True] * 4)
    history.observe(2, [False] * 3)
    history.observe(2, [True] * 3)
    history.observe(3, [False] * 3)
    history.observe(3, [False, True])
    history.observe(3, [False] * 3)
    assert [history.passes_over(i) for i in (1, 2, 3, 4)] == [True, False, False, False]


def test_off_it_remembers_nothing():
    history = PromptHistory(skip_after=0, skip_times=3)
    history.observe(1, [True] * 100)
    assert history.state_dict() == {}
    assert not history.passes_over(1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.booleans(), max_size=5)), max_size=30),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 30),
)
def test_state_round_trips_and_no_problem_is_passed_over_for_ever(groups, skip_after, skip_times, cut):
    history, resumed = PromptHistory(skip_after, skip_times), PromptHistory(skip_after, skip_times)
    for place, (problem, outcomes) in enumerate(groups):
        if place == cut:
            resumed = PromptHistory(skip_after, skip_times, json.loads(json.dumps(history.state_dict())))
        passed = history.passes_over(problem)
        if place >= cut:
            assert resumed.passes_over(problem) == passed
            resumed.observe(problem, outcomes)
        history.observe(problem, outcomes)
    for problem in range(4):
        assert [history.passes_over(problem) for _ in range(skip_times + 1)][-1] is False


@pytest.mark.parametrize("options", [{"skip_after": -1}, {"skip_after": 1.5}, {"skip_times": 0}, {"skip_times": True}])
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match="must be a whole number of at least"):
        FilterConfig(**options)
