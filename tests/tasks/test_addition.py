"""The addition task: the same sums everywhere, no held-out sum in training, right answers and nothing else paid."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.errors import ConfigError
from sagc_fast.model.loader import load_tokenizer
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.tasks import Problem, addition_sft, make_task, tokenize_prompt
from sagc_fast.tasks.addition import AdditionConfig, AdditionTask, is_heldout, policy_folder, score
from sagc_fast.types import SamplingParams


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


# ---- the shipped policy and how it is made --------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=5), st.integers(0, 10**6))
def test_every_worked_answer_is_true_in_every_clause(terms, seed):
    answer = addition_sft.draw_answer(random.Random(seed), terms, max_length=10_000)
    workings, _, final = answer.rpartition(">")
    assert int(final) == sum(terms)
    assert score(answer, Problem("", answer=sum(terms))) == 1.0
    passes = workings.split("?") if workings else []
    assert passes == [addition_sft.worked(terms)] * len(passes)
    for part in passes[:1]:
        clauses = [clause.split("=") for pair in part.split(";") for clause in pair.split(",")]
        for *_, summands, total in clauses:
            assert sum(map(int, summands.split("+"))) == int(total)
        columns = [int(total) for *_, total in [c.split("=") for c in part.split(";")[-1].split(",")]]
        assert int(str(columns[-1]) + "".join(str(c % 10) for c in columns[-2::-1])) == sum(terms)


@given(st.integers(0, 10**6))
def test_answers_fit_the_length_cap_whenever_one_pass_does(index):
    task = AdditionTask()
    terms = task.problem("train", index).meta["terms"]
    answer = addition_sft.draw_answer(random.Random(index), terms, task.max_new_tokens)
    assert len(addition_sft.encode(answer)) + 1 <= task.max_new_tokens
    assert addition_sft.UNKNOWN not in addition_sft.encode(answer)


def test_training_lowers_the_loss_and_repeats_itself(capsys):
    def loss_and_weights(num_steps):
        model = addition_sft.train(num_steps, batch_tokens=600, seed=1)
        return float(capsys.readouterr().out.split("loss")[1].split()[0]), model.embed_weight.detach()

    first_loss, _ = loss_and_weights(1)
    mean_loss, weights = loss_and_weights(12)
    assert mean_loss < first_loss - 0.3
    assert torch.equal(weights, loss_and_weights(12)[1])


def test_the_tokenizer_made_is_the_one_shipped_and_takes_every_character(tmp_path):
    addition_sft.save_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (policy_folder() / name).read_text()
    tokenizer = load_tokenizer(policy_folder())
    text = "17+385=7+5+0=12,1?;>402"
    ids = tokenize_prompt(Problem(text), tokenizer)
    assert ids == [addition_sft.BOS, *addition_sft.encode(text)]
    assert tokenizer.decode([*ids, addition_sft.EOS], skip_special_tokens=True) == text


@pytest.fixture(scope="module")
def groups():
    """24 held-out problems x 16 completions of the shipped policy at temperature 1."""
    task, engine = AdditionTask(), RolloutEngine.from_pretrained(policy_folder(), kv_budget_gb=0.1)
    problems = [task.problem("heldout", i) for i in range(24)]
    params = SamplingParams(max_new_tokens=task.max_new_tokens)
    return problems, engine.generate([p.prompt for p in problems], group_size=16, params=params)


def test_the_shipped_policy_leaves_room_to_learn(groups):
    rewards = [[score(c.text, p) for c in g.completions] for p, g in zip(*groups, strict=True)]
    texts = [c.text for g in groups[1] for c in g.completions]
    assert 0.35 < np.mean(rewards) < 0.7
    assert np.mean([0 < sum(r) < 16 for r in rewards]) > 0.4  # groups that teach something
    by_style = {guessed: [] for guessed in (True, False)}
    for reward, text in zip(np.ravel(rewards), texts, strict=True):
        by_style[text.startswith(">")].append(reward)
    assert np.mean(by_style[False]) > np.mean(by_style[True]) + 0.2  # working things out is what there is to find


def test_larger_groups_of_the_shipped_policy_straggle_more_often(groups):
    lengths = [g.lengths for g in groups[1]]

    def rate(size):
        parts = [group[i : i + size] for group in lengths for i in range(0, 16, size)]
        return np.mean([max(part) / statistics.median(part) > 2 for part in parts])

    assert rate(4) + 0.15 < rate(16)
    assert rate(16) > 0.4


def test_the_shipped_policy_is_small_and_says_how_it_was_made():
    assert sum(path.stat().st_size for path in policy_folder().iterdir()) < 4_000_000
    assert "python -m sagc_fast.tasks.addition_sft" in (policy_folder() / "README.md").read_text()


TRAIN_HELDOUT = ("train", "heldout")
GOLDEN_TRAIN = ["8+1+7=", "8+1=", "19+89=", "2+9+2="]
GOLDEN_HELDOUT = ["749+105+739=", "255+515=", "9+92+53=", "9+5="]
