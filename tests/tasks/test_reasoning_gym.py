"""reasoning-gym's generators: disjoint splits, prompts, and scoring that cannot be bought or broken into."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sagc_fast.errors import ConfigError
from sagc_fast.tasks import make_task
from sagc_fast.tasks.base import ScorerSpec
from sagc_fast.tasks.scoring import ScoringPool

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def task_of(generator="chain_sum", seed=0, **options):
    return make_task({"name": "reasoning_gym", "generator": generator, **options}, seed=seed)


def scores_of(task, pairs):
    with ScoringPool(task.scorer_spec, timeout_seconds=60.0) as pool:
        scores = pool.results([pool.submit(problem, text) for problem, text in pairs])
        assert pool.errors == {}
    return [(score.reward, score.outcome) for score in scores]


def scores_here(task, pairs):
    """In this process: a worker takes seconds to import the library."""
    from sagc_fast.tasks.reasoning_gym_own_scorer import score_by_generator

    assert task.scorer_spec.target.endswith(":score_by_generator")
    scores = [score_by_generator(text, problem, **task.scorer_spec.kwargs) for problem, text in pairs]
    return [(score.reward, score.outcome) for score in scores]


def test_a_few_shot_prompt_word_for_word():
    task = task_of(params=SMALL, few_shot=2)
    problem = task.problem("train", 0)
    first, second = task.examples
    ask = "State the final answer to the following arithmetic problem:"
    assert problem.prompt == (
        f"Question: {first['question']}\nAnswer: {first['answer']}\n\n"
        f"Question: {second['question']}\nAnswer: {second['answer']}\n\n"
        f"{problem.prompt[problem.prompt.rindex('Question:') :]}"
    )
    assert problem.prompt.count(ask) == 3
    assert problem.prompt.endswith("=\nAnswer:")
    assert problem.stop == ("\n",)
    assert int(problem.answer) == eval(problem.prompt.rpartition(ask)[2].partition("=")[0])


def test_a_template_may_name_the_generators_metadata():
    problem = task_of(params=SMALL, few_shot=1, template="{expression} = {answer}", separator="\n").problem("train", 3)
    example, own = problem.prompt.split("\n")
    assert own.endswith(" =")
    left, _, right = example.partition(" = ")
    assert eval(left) == int(right)
    assert eval(own.removesuffix(" =")) == int(problem.answer)


def test_chat_sends_examples_as_turns():
    problem = task_of(params=SMALL, few_shot=1, chat=True, instruction="Be brief.").problem("heldout", 0)
    assert [m["role"] for m in problem.messages] == ["system", "user", "assistant", "user"]
    assert problem.messages[-1]["content"] == problem.prompt
    assert problem.stop == ()


def test_problems_are_fixed_by_index_and_seed():
    a, b, other = task_of(params=SMALL), task_of(params=SMALL), task_of(params=SMALL, seed=1)
    order = [31, 0, 500, 7, 100_000, 31]
    assert {i: a.problem("train", i) for i in order} == {i: b.problem("train", i) for i in reversed(order)}
    assert [a.problem("train", i).prompt for i in range(8)] != [other.problem("train", i).prompt for i in range(8)]
    assert [a.problem("heldout", i) for i in range(8)] == [other.problem("heldout", i) for i in range(8)]


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_no_held_out_question_is_ever_a_training_question_or_an_example(seed):
    """A generator with some 200 different questions: seeds alone could not keep them apart."""
    task = task_of(params=SMALL | {"max_digits": 1}, few_shot=4, seed=seed)
    train = {task.problem("train", i).prompt for i in range(600)}
    heldout = {task.problem("heldout", i).prompt for i in range(200)}
    assert len(train) > 90
    assert len(heldout) > 25
    assert not train & heldout
    for example in task.examples:
        assert not any(prompt.endswith(f"Question: {example['question']}\nAnswer:") for prompt in train | heldout)


def test_splitting_by_seed_never_meets_a_seed_twice():
    task = task_of(params=SMALL, split_by="seed")
    ids = [task.problem(split, i).problem_id for split in ("train", "heldout") for i in range(200)]
    assert len(set(ids)) == 400


def test_the_first_answer_line_decides():
    task = task_of(params=SMALL, few_shot=1)
    problem = task.problem("train", 0)
    right = problem.answer
    texts = [
        f" {right}",
        f"{right}.0",
        f"\n{right}\nQuestion",
        f"{right} apples",
        f"1{right}",
        "",
        "no",
        f"no\n{right}",
    ]
    assert [outcome for _, outcome in scores_of(task, [(problem, t) for t in texts])] == [True] * 3 + [False] * 5


def test_merely_containing_the_answer_earns_nothing():
    """The library pays len(answer) / len(text) for it."""
    task = task_of("letter_counting")
    problem = task.problem("train", 0)
    assert scores_of(task, [(problem, f"0 1 2 3 4 5 6 7 8 9 {problem.answer}")]) == [(0.0, False)]


@pytest.mark.parametrize("generator", ["countdown", "puzzle24"])
def test_countdown_is_judged_by_arithmetic(generator):
    task = task_of(generator)
    assert task.scorer_spec.target.endswith(":score_countdown")
    problem = task.problem("train", 0)
    target = problem.meta["entry"]["metadata"].get("target", 24)
    numbers = problem.meta["entry"]["metadata"]["numbers"]
    padded = f"{target} + 0*({' + '.join(map(str, numbers))})"
    hostile = ["9**9**9**9", "__import__('os')._exit(0)", str(target), padded]
    pairs = [(problem, text) for text in (problem.answer, *hostile)]
    assert scores_of(task, pairs) == [(1.0, True)] + [(0.0, False)] * 4


@pytest.mark.parametrize(
    ("generator", "scored"), [("simple_integration", scores_of), ("n_queens", scores_here)], ids=["pool", "here"]
)
def test_hostile_text_never_reaches_a_scorer_that_evaluates(generator, scored, tmp_path):
    task = task_of(generator, extract="text")
    problem = task.problem("train", 0)
    mark = tmp_path / "executed"
    hostile = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"open({str(mark)!r}, 'w')",
        "9**9**9**9",
        "().__class__.__base__.__subclasses__()",
    ]
    pairs = [(problem, text) for text in (problem.answer, *hostile)]
    assert scored(task, pairs) == [(1.0, True)] + [(0.0, False)] * 4
    assert not mark.exists()


def test_an_equivalent_integral_is_correct_and_partial_credit_is_never_an_outcome():
    task = task_of("simple_integration")
    problem = task.problem("train", 0)
    wrapped = f"({problem.answer.replace(' + C', '')}) + C"
    assert scores_here(task, [(problem, wrapped)]) == [(1.0, True)]
    paid = task_of("letter_counting", partial_credit=True)
    problem = paid.problem("train", 0)
    ((reward, outcome),) = scores_here(paid, [(problem, f"it is {problem.answer}!")])
    assert 0.0 < reward < 1.0
    assert outcome is False


SLOW = frozenset(
    {
        "acre", "arc_agi", "codeio", "composite", "countdown", "figlet_font", "futoshiki", "group_anagrams",
        "knight_swap", "polynomial_equations", "puzzle24", "rearc", "word_ladder", "zebra_puzzles",
    }
)  # fmt: skip


def test_nearly_every_generator_accepts_its_own_answer_and_no_nonsense():
    """Through the mode that is chosen for each; in this process, for speed. The slowest ones are left out."""
    from reasoning_gym.factory import DATASETS

    from sagc_fast.tasks import reasoning_gym_own_scorer, reasoning_gym_scorer

    modules = {m.__name__: m for m in (reasoning_gym_own_scorer, reasoning_gym_scorer)}
    wrong = []
    for name in sorted(set(DATASETS) - SLOW):
        task = task_of(name, split_by="seed", extract="text")
        problem = task.problem("train", 0)
        module, _, function = task.scorer_spec.target.partition(":")
        score = getattr(modules[module], function)
        if problem.answer and not score(problem.answer, problem, **task.scorer_spec.kwargs).outcome:
            wrong.append(f"{name} refuses its own answer")
        if score("no such answer", problem, **task.scorer_spec.kwargs).outcome:
            wrong.append(f"{name} accepts nonsense")
    assert wrong == []


def test_exact_scoring_never_imports_the_library():
    task = task_of(params=SMALL)
    assert task.scorer_spec == ScorerSpec("sagc_fast.tasks.reasoning_gym_scorer:score_exact", {"extract": "first_line"})
    code = (
        "import sys, sagc_fast.tasks.reasoning_gym_scorer\n"
        "sys.exit(any(m in sys.modules for m in ('reasoning_gym', 'sympy', 'torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": "chain_sums"}, "'chain_sums', which reasoning-gym does not have; did you mean chain_sum?"),
        ({"generator": "zzz"}, "DATASETS lists them"),
        ({"params": {"min_term": 1}}, "do not suit the generator 'chain_sum'.*min_term"),
        ({"params": {"min_terms": 0}}, "min_terms must be positive"),
        ({"params": 3}, "a mapping of the generator's options"),
        ({"template": "{question}"}, "holds {answer}"),
        ({"template": "{nonsense} {answer}"}, "'nonsense'.*it may name answer"),
        ({"extract": "first line"}, "did you mean first_line"),
        ({"few_shot": -1}, "from 0 to 64"),
        ({"few_shto": 1}, "did you mean few_shot"),
        ({"generator": "rubiks_cube", "few_shot": 1}, "no reference answers to show"),
        ({"params": {"min_terms": 1, "max_terms": 1, "max_digits": 1}, "few_shot": 30}, "lower it"),
        ({"scoring": "exact", "partial_credit": True}, "auto or generator"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        task_of(**options)


def test_without_the_library_the_remedy_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install sagc_fast\[tasks\]"):
        task_of()
