"""The factory, the records and the prompt's tokens."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest

from sagc_fast.errors import ConfigError
from sagc_fast.tasks import Problem, Task, make_task, tokenize_prompt
from sagc_fast.tasks.base import ScorerSpec, config_from_mapping, task_names


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    return str(tmp_path / "a.jsonl")


def test_every_name_is_known(path):
    assert task_names() == ["addition", "dataset", "huggingface", "jsonl", "parquet", "reasoning_gym"]
    for name in ("dataset", "jsonl"):
        assert isinstance(make_task({"name": name, "path": path}), Task)


def test_an_own_reward_replaces_the_tasks_scorer(path):
    task = make_task({"name": "jsonl", "path": path, "reward": "mine:score", "reward_kwargs": {"a": 1}})
    assert task.scorer_spec == ScorerSpec("mine:score", {"a": 1})
    assert isinstance(task, Task)
    assert (task.name, task.size("train"), task.problem("train", 0).answer) == ("dataset", 1, "2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "task.name is None"),
        ({"name": "reasoning_gim"}, "did you mean reasoning_gym"),
        ({"name": "jsonl"}, "task.path is missing"),
        ({"name": "jsonl", "path": "x", "reward": 3}, "must be a string module:function"),
        ({"name": "jsonl", "path": "x", "pth": "x"}, "task.pth is not an option here.*did you mean path"),
        ({"name": "jsonl", "path": 3}, "task.path is 3"),
    ],
)
def test_bad_configurations_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        make_task(config)


def test_reward_options_without_a_reward_are_refused(path):
    with pytest.raises(ConfigError, match="reward_kwargs is given without"):
        make_task({"name": "jsonl", "path": path, "reward_kwargs": {}})
    with pytest.raises(ConfigError, match="must be a mapping"):
        make_task({"name": "jsonl", "path": path, "reward": "a:b", "reward_kwargs": 3})


def test_every_option_is_named_where_one_is_unknown():
    with pytest.raises(ConfigError, match=r"task.foo is not an option here; .*max_digits.*, reward, reward_kwargs"):
        make_task({"name": "addition", "foo": 1})
    with pytest.raises(ConfigError, match="did you mean reward_kwargs"):
        make_task({"name": "addition", "reward_kwarg": {}})


def test_lists_of_a_configuration_become_tuples():
    @dataclass(frozen=True)
    class Options:
        stop: tuple[str, ...] = ()

    assert config_from_mapping(Options, {"stop": ["a"]}, "task").stop == ("a",)


def test_a_problem_travels_by_pickle():
    problem = Problem("q", answer=[1, {"a": 2}], meta={"entry": (1, 2)}, stop=("\n",))
    assert pickle.loads(pickle.dumps(problem)) == problem


class ByteTokenizer:
    chat_template = "..."

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + list(text.encode())}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def test_a_plain_prompt_gets_the_tokenizers_special_tokens_and_a_chat_its_template():
    tokenizer = ByteTokenizer()
    assert tokenize_prompt(Problem("ab"), tokenizer) == [1, 97, 98]
    chat = Problem("ab", messages=({"role": "user", "content": "ab"},))
    assert bytes(tokenize_prompt(chat, tokenizer)) == b"<user>ab<assistant>"
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        tokenize_prompt(chat, tokenizer)


def test_tasks_import_no_torch():
    code = (
        "import sys, sagc_fast.tasks, sagc_fast.tasks.scoring, sagc_fast.tasks.dataset, sagc_fast.tasks.reasoning_gym\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'sympy', 'pyarrow', 'reasoning_gym')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
