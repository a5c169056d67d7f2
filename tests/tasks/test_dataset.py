"""Prompts from files: formats, splits, math-verify, and errors that name file and line."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.errors import ConfigError, DatasetError
from sagc_fast.tasks import make_task
from sagc_fast.tasks.base import Problem
from sagc_fast.tasks.dataset import reference_answer
from sagc_fast.tasks.scoring import ScoringPool

ROWS = [{"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = <<{i}+{i}>>.\n#### {2 * i:,}"} for i in range(40)]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(path, seed=0, **options):
    return make_task({"name": "dataset", "path": str(path), **options}, seed=seed)


def questions(task, split, indices):
    return [task.problem(split, i).prompt for i in indices]


def test_jsonl_rows_become_problems(tmp_path):
    task = task_of(write_jsonl(tmp_path / "a.jsonl"), template="Q: {question} {x}\nA:", stop="\nQ:")
    assert (task.size("train"), task.size("heldout")) == (40, 0)
    problem = next(p for p in (task.problem("train", i) for i in range(40)) if p.problem_id == 7)
    assert problem == Problem(
        "Q: What is 7 + 7? {x}\nA:", answer="14", meta={"split": "train"}, problem_id=7, stop=("\nQ:",)
    )


def write_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def write_saved_dataset(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    return tmp_path / "saved"


def write_saved_dict(tmp_path):
    import datasets

    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:3])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "dict")
    return tmp_path / "dict"


def write_folder(tmp_path):
    folder = tmp_path / "folder" / "data"
    folder.mkdir(parents=True)
    write_jsonl(folder / "test-00000.jsonl", ROWS[:3])
    write_jsonl(folder / "train-00000.jsonl", ROWS[:15])
    write_jsonl(folder / "train-00001.jsonl", ROWS[15:])
    return tmp_path / "folder"


@pytest.mark.parametrize("write", [write_parquet, write_saved_dataset, write_saved_dict, write_folder])
def test_every_format_holds_the_same_rows(write, tmp_path):
    reference = task_of(write_jsonl(tmp_path / "a.jsonl"))
    task = task_of(write(tmp_path))
    assert [task.problem("train", i) for i in range(40)] == [reference.problem("train", i) for i in range(40)]


@pytest.mark.parametrize("write", [write_saved_dict, write_folder])
def test_a_held_out_split_of_the_same_source(write, tmp_path):
    task = task_of(write(tmp_path), heldout_split="test")
    assert (task.size("train"), task.size("heldout")) == (40, 3)
    assert sorted(questions(task, "heldout", range(3))) == [f"What is {i} + {i}?" for i in range(3)]


def test_each_epoch_has_its_own_order_and_every_row_once(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    task, same, other = task_of(path), task_of(path), task_of(path, seed=1)
    first, second = questions(task, "train", range(40)), questions(task, "train", range(40, 80))
    assert sorted(first) == sorted(second) == sorted(r["question"] for r in ROWS)
    assert first != second
    assert questions(same, "train", [79, 3, 41]) == [second[39], first[3], second[1]]
    assert questions(other, "train", range(40)) != first


def test_a_held_out_fraction_keeps_equal_questions_on_one_side(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS * 2)
    task = task_of(path, heldout_fraction=0.3)
    train = set(questions(task, "train", range(task.size("train"))))
    heldout = set(questions(task, "heldout", range(task.size("heldout"))))
    assert train | heldout == {r["question"] for r in ROWS}
    assert not train & heldout
    assert 4 <= len(heldout) <= 20
    again = task_of(path, seed=5, heldout_fraction=0.3)
    assert questions(again, "heldout", range(20)) == questions(task, "heldout", range(20))


def test_chat_messages(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl")
    problem = task_of(path, chat=True, system="Think.", template="{question} Box it.").problem("train", 0)
    assert problem.messages == (
        {"role": "system", "content": "Think."},
        {"role": "user", "content": problem.prompt},
    )
    assert problem.prompt.endswith("? Box it.")


@pytest.mark.parametrize(
    ("text", "answer_format", "answer"),
    [
        ("6 x 7 = <<6*7=42>>42\n#### 42", "auto", "42"),
        ("so \\boxed{1} then \\boxed{\\frac{3}{4}}.", "auto", "\\frac{3}{4}"),
        (" 42 ", "auto", "42"),
        ("#### 1", "plain", "#### 1"),
    ],
)
def test_reference_answers(text, answer_format, answer):
    assert reference_answer(text, answer_format, "here") == answer


@given(st.text(max_size=60))
def test_an_answer_is_found_in_whatever_is_not_blank(text):
    if text.strip():
        assert reference_answer(text, "auto", "f, line 3").strip()
    else:
        with pytest.raises(DatasetError, match="f, line 3"):
            reference_answer(text, "auto", "f, line 3")


def test_math_verify_judges_in_the_workers(tmp_path):
    task = task_of(write_jsonl(tmp_path / "a.jsonl"))
    cases = [
        ("14", "7 + 7 = <<7+7=14>>14\n#### 14", True),
        ("14", "The answer is \\boxed{14}", True),
        ("14", "The answer is $14$.", True),
        ("14", "14 or rather \\boxed{15}", False),
        ("14", "", False),
        ("14", "no idea", False),
        ("1,000", "#### 1000", True),
        ("\\frac{1}{2}", "\\boxed{0.5}", True),
        ("x^2 + 1", "\\boxed{1 + x^2}", True),
        ("x^2 + 1", "\\boxed{1 + x^3}", False),
        ("14", "\\boxed{9**9**9**9}", False),
        ("14", "\\boxed{", False),
    ]
    with ScoringPool(task.scorer_spec, timeout_seconds=60.0) as pool:
        tickets = [pool.submit(Problem("q", answer=gold), text) for gold, text, _ in cases]
        assert [score.outcome for score in pool.results(tickets)] == [expected for *_, expected in cases]
        assert pool.errors == {}


def test_exact_comparison(tmp_path):
    task = task_of(write_jsonl(tmp_path / "a.jsonl"), check="exact")
    cases = [
        ("14", "so\n14", True),
        ("14", "14\nso", False),
        ("14", "\\boxed{14.0} so", True),
        ("yes", "####yes", True),
    ]
    with ScoringPool(task.scorer_spec) as pool:
        tickets = [pool.submit(Problem("q", answer=gold), text) for gold, text, _ in cases]
        assert [score.outcome for score in pool.results(tickets)] == [expected for *_, expected in cases]


LINE = b'{"question": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINE + b"\n{'question': 'a'}\n", r"bad\.jsonl, line 3 is not JSON"),
        (LINE + b'{"question": "b", "answer": "2"\n', r"line 2 is not JSON"),
        (LINE + b'["b", "2"]\n', r"line 2 holds a list; each line must be one JSON object"),
        (LINE + b'{"problem": "b", "answer": "2"}\n', r"line 2 has no column 'question'; it has 'problem', 'answer'"),
        (LINE + b'{"question": "b", "answer": null}\n', r"line 2: column 'answer' holds None"),
        (LINE + b'{"question": " ", "answer": "2"}\n', r"line 2: column 'question' is empty"),
        (LINE + b'{"question": "\xff", "answer": "2"}\n', r"line 2 is not UTF-8 \(byte 15"),
        (b"", r"bad\.jsonl holds no rows"),
        (b"\n\n", r"bad\.jsonl holds no rows"),
    ],
)
def test_a_bad_line_is_named_with_its_file(content, message, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        task_of(tmp_path / "bad.jsonl")


def test_numbers_windows_line_ends_and_a_byte_order_mark_are_fine(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "a\\u2028b", "answer": 1.5}\r\n')
    assert task_of(tmp_path / "a.jsonl").problem("train", 0).answer == "1.5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_format": "gsm8k"}, r"a\.jsonl, line 1: the answer '2' has no ####"),
        ({"answer_format": "boxed"}, r"line 1: the answer '2' has no closed"),
        ({"question_column": "prompt"}, r"line 1 has no column 'prompt'; it has 'question', 'answer'"),
        ({"heldout_path": "/nowhere.jsonl"}, "no dataset at /nowhere.jsonl"),
        ({"heldout_fraction": 0.999999}, "leaves no question to train on"),
    ],
)
def test_what_does_not_fit_the_file_is_named(options, message, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1+1", "answer": "2"}])
    with pytest.raises(DatasetError, match=message):
        task_of(path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "Q:"}, "text with {question}"),
        ({"heldout_fraction": 1.0}, r"a number in \[0, 1\)"),
        ({"heldout_fraction": 0.1, "heldout_split": "test"}, "keep one of them"),
        ({"check": "maths"}, "math or exact"),
        ({"extract": "bxed"}, "did you mean boxed"),
        ({"system": "Think."}, "set without task.chat"),
        ({"question_colum": "q"}, "did you mean question_column"),
        ({"max_new_tokens": 0}, "at least 1"),
    ],
)
def test_bad_options_are_named(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        task_of(write_jsonl(tmp_path / "a.jsonl"), **options)


def test_missing_and_damaged_sources_are_named(tmp_path):
    with pytest.raises(DatasetError, match="no dataset at"):
        task_of(tmp_path / "nothing.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="holds no dataset file"):
        task_of(tmp_path / "empty")
    (tmp_path / "a.csv").write_text("question,answer\n")
    with pytest.raises(DatasetError, match=r"ends in '\.csv'"):
        task_of(tmp_path / "a.csv")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DatasetError, match=r"b\.parquet is not a readable parquet file"):
        task_of(tmp_path / "b.parquet")
    with pytest.raises(DatasetError, match=r"no column 'q'; it has 'question', 'answer'"):
        task_of(write_parquet(tmp_path), question_column="q")
    saved = write_saved_dict(tmp_path)
    with pytest.raises(DatasetError, match="has no split 'dev'; it has train, test"):
        task_of(saved, split="dev")
    with pytest.raises(DatasetError, match="holds no file of the split 'dev'"):
        task_of(write_folder(tmp_path), split="dev")
    next((saved / "train").glob("*.arrow")).unlink()
    with pytest.raises(DatasetError, match="which is not there; copy the whole folder"):
        task_of(saved)


def test_asking_for_held_out_problems_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"set task\.heldout_path"):
        task_of(write_jsonl(tmp_path / "a.jsonl")).problem("heldout", 0)


def test_without_pyarrow_the_remedy_is_given(tmp_path, monkeypatch):
    path = write_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install sagc_fast\[tasks\]"):
        task_of(path)
