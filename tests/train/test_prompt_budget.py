"""Prompts per step when the group size changes: what is held constant stays constant."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.train.prompt_budget import PromptBudget


def test_prompts_are_held():
    budget = PromptBudget("prompts", 12, 16)
    assert [budget.num_prompts(g) for g in (4, 8, 16)] == [12, 12, 12]


def test_completions_are_held():
    budget = PromptBudget("completions", 12, 16)
    assert [g * budget.num_prompts(g) for g in (4, 8, 16)] == [192, 192, 192]


def test_tokens_are_held_by_the_lengths_of_past_steps():
    budget = PromptBudget("tokens", 12, 16)
    assert budget.num_prompts(16) == 12, "nothing is known before the first step"
    budget.observe([[10, 30], [20, 20]])
    assert budget.num_prompts(8) == 24
    for _ in range(100):
        budget.observe([[40, 40]])
    assert budget.num_prompts(8) == 12, "completions twice as long: half the prompts"


@given(st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=4), min_size=1, max_size=5), st.integers(2, 64))
def test_always_at_least_one_prompt_and_resumable(lengths, group_size):
    budget = PromptBudget("tokens", 1, 64)
    for step in lengths:
        budget.observe([step])
    again = PromptBudget("tokens", 1, 64, json.loads(json.dumps(budget.state_dict())))
    assert again.num_prompts(group_size) == budget.num_prompts(group_size) >= 1
