"""A step's rollout: scored while it runs, keyed by position, refilled within a budget, first round kept apart."""

from __future__ import annotations

import pickle
import time

import pytest

from sagc_fast.algo.config import FilterConfig
from sagc_fast.errors import DatasetError
from sagc_fast.tasks.base import Problem, Score
from sagc_fast.train.accounting import completion_figures, merge_stats, straggler_figures
from sagc_fast.train.draw import MAX_UNUSABLE_IN_ROW, PromptSource
from sagc_fast.train.sampling import Sampler
from sagc_fast.types import Completion, Group, RolloutStats, SamplingParams


class FakeTokenizer:
    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}


class FakeEngine:
    """Completes groups in reverse order; a completion's length is 1 + prompt id + sample index."""

    tokenizer = FakeTokenizer()

    def __init__(self):
        self.calls = []
        self.stats = RolloutStats()

    def generate(self, prompts, group_size, params, *, prompt_ids, on_group):
        self.calls.append((list(prompt_ids), group_size, params))
        groups = []
        for index, (prompt, pid) in enumerate(zip(prompts, prompt_ids, strict=True)):
            completions = [
                Completion(i, [7] * (1 + pid + i), [0.0] * (1 + pid + i), "stop", text=f"{pid}/{i}")
                for i in range(group_size if isinstance(group_size, int) else group_size[index])
            ]
            groups.append(Group(index, prompt, completions, pid))
        for group in reversed(groups):
            on_group(group)
        lengths = [n for g in groups for n in g.lengths]
        self.stats = RolloutStats(
            num_prompts=len(groups), num_completions=len(lengths), num_output_tokens=sum(lengths), capacity_rows=4,
            active_rows=[4, 2], idle_fraction=0.25, total_seconds=1.0,
        )  # fmt: skip
        return groups


class FakePool:
    """Scores by ``outcome(prompt id, sample index)`` and notes when it was asked."""

    def __init__(self, outcome):
        self.outcome, self.submitted = outcome, []

    def submit_many(self, problem, texts):
        self.submitted.append(problem.problem_id)
        return texts

    def results(self, tickets):
        scores = []
        for text in tickets:
            right = self.outcome(*map(int, text.split("/")))
            scores.append(Score(float(right) - 0.25, right))
        return scores


class FakeTask:
    name, max_new_tokens, scorer_spec = "fake", 8, None

    def problem(self, split, index):
        return Problem(f"{split}{index}", problem_id=index, stop=(f"stop{index}",))

    def size(self, split):
        return None


def sampler(outcome, **filters):
    engine, pool = FakeEngine(), FakePool(outcome)
    params = SamplingParams(max_new_tokens=8, seed=5)
    source = PromptSource(FakeTask(), engine.tokenizer, max_prompt_tokens=7)
    return Sampler(engine, source, pool, params, FilterConfig(**filters)), engine, pool


def mixed(pid, i):
    return i == 0


def test_groups_come_in_order_with_their_problems_and_scores():
    s, engine, pool = sampler(mixed)
    seen = []
    rollout = s.sample(10, 3, 2, progress=lambda done, total: seen.append((done, total)))
    assert [g.problem.problem_id for g in rollout.groups] == [10, 11, 12]
    assert pool.submitted == [12, 11, 10], "a group goes to the scorers when it is complete, not at the end"
    assert [g.outcomes for g in rollout.groups] == [[True, False]] * 3
    assert rollout.kept == rollout.groups == rollout.first_round
    assert seen == [(1, 3), (2, 3), (3, 3)]
    prompt_ids, group_size, params = engine.calls[0]
    assert (prompt_ids, group_size) == ([10, 11, 12], 2), "the noise key is the position of the draw"
    assert [p.stop for p in params] == [("stop10",), ("stop11",), ("stop12",)]
    assert {p.seed for p in params} == {5}


def test_finished_groups_are_laid_out_during_generation_in_whatever_order():
    """The fake engine finishes them backwards; the step sees them in order, each with its own tokens."""
    s, engine, _ = sampler(mixed)
    seen = []
    original = engine.generate

    def generate(*args, on_group, **options):
        groups = original(*args, on_group=on_group, **options)
        seen.append(time.perf_counter())
        return groups

    engine.generate = generate
    rollout = s.sample(10, 3, 2)
    for g in rollout.groups:
        assert g.packed.item.prompt == g.group.prompt_token_ids
        assert g.packed.lengths == g.group.lengths
        assert "tensors" in g.packed.item.__dict__
    assert rollout.pack_seconds > 0
    assert rollout.rollout_seconds >= rollout.pack_seconds
    assert 0 <= rollout.reward_seconds <= rollout.gap_seconds <= time.perf_counter() - seen[0]
    sent = pickle.loads(pickle.dumps(rollout.groups[0]))
    assert sent == rollout.groups[0]
    assert sent.packed is None, "other processes lay out what they compute"


def test_prompts_that_do_not_fit_are_passed_over_and_said_once(caplog):
    s, engine, _ = sampler(mixed)
    rollout = s.sample(98, 2, 2)
    assert [g.problem.problem_id for g in rollout.groups] == [98, 99]
    with pytest.raises(DatasetError, match=f"{MAX_UNUSABLE_IN_ROW} problems of the train split in a row"):
        s.sample(rollout.next_position, 2, 2)
    assert caplog.text.count("passed over") == 1
    assert "a prompt of 8 tokens" in caplog.text
    source = PromptSource(OddTask(), engine.tokenizer, max_prompt_tokens=7)
    drawn = source.draw("train", 0, 2)
    assert (drawn.positions, drawn.next_position) == ([1, 3], 4)
    assert source.draw("heldout", 0, 9, end=4).positions == [1, 3]


class OddTask(FakeTask):
    """Even problems are empty."""

    def problem(self, split, index):
        return Problem("x" * (index % 2), problem_id=index)


def test_dynamic_sampling_refills_and_keeps_what_it_has():
    s, engine, _ = sampler(lambda pid, i: pid % 2 == 0 and i == 0, dynamic_sampling=True)
    rollout = s.sample(0, 4, 2)
    assert len(rollout.kept) == 4
    assert [g.problem.problem_id for g in rollout.kept] == [0, 2, 4, 6]
    assert engine.calls[0][0] == [0, 1, 2, 3]
    assert engine.calls[1][0] == [4, 5, 6, 7], "half of them are kept, so twice as many are drawn"
    assert [g.problem.problem_id for g in rollout.first_round] == [0, 1, 2, 3], "what the controller observes"


@pytest.mark.parametrize("right", [True, False])
def test_without_any_signal_the_budget_ends_the_step(right):
    s, engine, _ = sampler(lambda pid, i: right, dynamic_sampling=True, max_refill_factor=3.0)
    rollout = s.sample(0, 4, 2)
    assert rollout.kept == []
    assert len(rollout.groups) == 12
    assert len(engine.calls) == 3


def test_a_budget_in_seconds_ends_it_too():
    s, engine, _ = sampler(lambda pid, i: True, dynamic_sampling=True, max_refill_seconds=0.0)
    assert len(s.sample(0, 4, 2).groups) == 4
    assert len(engine.calls) == 1


def test_it_judges_by_outcome_not_by_reward():
    """Rewards here are 0.75 and -0.25: shaped, different, and yet without a right answer in the second case."""
    s, _, _ = sampler(lambda pid, i: False, dynamic_sampling=True, max_refill_factor=1.0)
    assert s.sample(0, 2, 2).kept == []


def test_prompts_may_have_sizes_of_their_own_and_a_refill_does_not_change_them():
    """Every round asks about all prompts of the step so far, so a new one's place in the step is its own."""
    s, engine, _ = sampler(lambda pid, i: pid % 2 == 0 and i == 0, dynamic_sampling=True)
    asked = []

    def decide(problem_ids):
        asked.append(list(problem_ids))
        return [2 + place for place in range(len(problem_ids))]

    rollout = s.sample(0, 3, decide)
    assert asked == [list(range(len(ids))) for ids in asked]
    assert len(asked) > 1
    assert [len(g.group.completions) for g in rollout.groups] == [2 + place for place in range(len(rollout.groups))]
    assert list(engine.calls[0][1]) == [2, 3, 4]


def test_off_keeps_everything():
    s, engine, _ = sampler(lambda pid, i: True)
    assert len(s.sample(0, 4, 2).kept) == 4
    assert len(engine.calls) == 1


def test_figures_count_all_groups_and_stragglers_the_first_round():
    s, _, _ = sampler(lambda pid, i: pid % 2 == 0 and i == 0, dynamic_sampling=True)
    rollout = s.sample(0, 4, 3)
    figures = completion_figures(rollout)
    assert (figures["num_groups_sampled"], figures["num_groups_kept"]) == (8, 4)
    assert figures["outcome_mean"] == pytest.approx(4 / 24)
    assert figures["length_max"] == 1 + 7 + 2
    stragglers = straggler_figures(rollout.first_round, tau=1.4)
    assert stragglers["num_groups"] == 4
    assert stragglers["straggler_ratio_max"] == 3 / 2
    assert stragglers["num_straggler_groups"] == 1


def test_rounds_add_up():
    a = RolloutStats(num_prompts=1, num_completions=2, num_output_tokens=10, capacity_rows=4, active_rows=[4, 4],
                     idle_fraction=0.0, clipped_ratio=1.0, total_seconds=1.0, num_preemptions=1)  # fmt: skip
    b = RolloutStats(num_prompts=3, num_completions=6, num_output_tokens=30, capacity_rows=2, active_rows=[1, 1],
                     idle_fraction=0.5, clipped_ratio=0.0, total_seconds=2.0)  # fmt: skip
    both = merge_stats([a, b])
    assert (both.num_output_tokens, both.total_seconds, both.num_preemptions) == (40, 3.0, 1)
    assert both.active_rows == [4, 4, 1, 1]
    assert both.idle_fraction == pytest.approx(1 - 10 / 12)
    assert both.clipped_ratio == 0.25
    assert merge_stats([a]) is a
