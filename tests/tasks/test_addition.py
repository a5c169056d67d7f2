"""The addition task: the same sums everywhere, no held-out sum in training, right answers and nothing else paid."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.errors import ConfigError
from sagc_fast.tasks import Problem, make_task
from sagc_fast.tasks.addition import AdditionConfig, AdditionTask, is_heldout, score


def test_problems_depend_on_split_seed_and_index_alone():
    """Golden prompts: a change here would move the data of every recorded run."""
    task = make_task({"name": "addition"}, seed=0)
    assert [task.problem("train", i).prompt for i in range(4)] == GOLDEN_TRAIN
    assert [task.problem("heldout", i).prompt for i in range(4)] == GOLDEN_HELDOUT
    assert task.problem("train", 3) == AdditionTask(seed=0).problem("train", 3)
    assert task.problem("train", 3) != AdditionTask(seed=1).problem("train", 3)
    assert task.problem("heldout", 3) == AdditionTask(seed=1).problem("heldout", 3)


def test_no_heldout_sum_occurs_in_training_in_any_order():
    task = AdditionTask(AdditionConfig(max_digits=1, max_terms=2))  # 45 sums up to order: every one is met
    seen = {split: {tuple(sorted(task.problem(split, i).meta["terms"])) for i in range(600)} for split in TRAIN_HELDOUT}
    assert all(seen.values())
    assert not seen["train"] & seen["heldout"]
    assert len(seen["train"] | seen["heldout"]) == 45


@given(st.integers(0, 10**6), st.sampled_from(["train", "heldout"]), st.integers(1, 7), st.integers(2, 5))
def test_a_problem_is_what_its_configuration_allows(index, split, max_digits, max_terms):
    config = AdditionConfig(max_digits=max_digits, max_terms=max_terms)
    problem = AdditionTask(config).problem(split, index)
    terms = [int(t) for t in problem.prompt.rstrip("=").split("+")]
    assert 2 <= len(terms) <= max_terms
    assert all(1 <= t < 10**max_digits for t in terms)
    assert problem.answer == sum(terms)
    assert is_heldout(terms) == (split == "heldout") == is_heldout(terms[::-1])


def test_digits_and_terms_are_spread_geometrically():
    problems = [AdditionTask().problem("train", i) for i in range(4000)]
    widths = np.array([max(len(str(t)) for t in p.meta["terms"]) for p in problems])
    terms = np.array([len(p.meta["terms"]) for p in problems])
    # held-out sums are skipped at random, so the shares stay those of the capped geometric draw
    assert np.mean(widths == 1) == pytest.approx(0.4, abs=0.03)
    assert np.mean(widths == 4) == pytest.approx(0.6**3, abs=0.03)
    assert np.mean(terms == 2) == pytest.approx(0.75, abs=0.03)
    assert np.mean(terms == 4) == pytest.approx(0.25**2, abs=0.03)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (">402", 1.0),
        ("7+5+0=12,1+8+1=10,0+3+1=4>402", 1.0),
        ("total nonsense>402", 1.0),
        ("402", 0.0),
        ("", 0.0),
        (">", 0.0),
        (">0402", 0.0),
        (">402>402", 0.0),
        (">401?>402", 0.0),
        (">402 ", 0.0),
        (">40", 0.0),
        (">4021", 0.0),
        (">+402", 0.0),
        (">\uff14\uff10\uff12", 0.0),  # digits, but not those of the tokenizer
    ],
)
def test_only_the_exact_sum_after_one_mark_is_paid(text, reward):
    assert score(text, Problem("17+385=", answer=402)) == reward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_digits": 0}, "task.max_digits is 0"),
        ({"max_terms": 1}, "task.max_terms is 1"),
        ({"more_digits": 1.0}, "task.more_digits is 1.0"),
        ({"more_terms": "x"}, "task.more_terms is 'x'"),
        ({"max_digit": 3}, "did you mean max_digits"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        make_task({"name": "addition", **options})


def test_an_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="'test'"):
        AdditionTask().problem("test", 0)


def test_the_task_needs_no_torch():
    code = "import sys, sagc_fast.tasks.addition as a; a.AdditionTask().problem('train', 0)"
    subprocess.run([sys.executable, "-c", code + "; sys.exit('torch' in sys.modules)"], check=True)


TRAIN_HELDOUT = ("train", "heldout")
GOLDEN_TRAIN: list[str] = []
GOLDEN_HELDOUT: list[str] = []
