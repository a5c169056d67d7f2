"""The configurations that are shipped: every one can be read, and its task made where nothing must be fetched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sagc_fast.commands import demo
from sagc_fast.config import TrainConfig, changed_fields
from sagc_fast.tasks import make_task

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_configuration_is_valid_and_says_what_it_is_for(path):
    config = TrainConfig.from_yaml(path)
    assert config.run_dir == f"runs/{path.stem}"
    assert path.read_text().startswith("# ")
    assert config.controller.kind == "fixed" or config.controller.delta > 0
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_its_task_gives_problems_of_both_splits(path, tmp_path):
    options = dict(TrainConfig.from_yaml(path).task)
    if "path" in options:  # the user's own file
        options["path"] = str(tmp_path / "math.jsonl")
        lines = [json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) for i in range(50)]
        Path(options["path"]).write_text("\n".join(lines))
    task = make_task(options, seed=0)
    problems = [task.problem(split, i) for split in ("train", "heldout") for i in range(3)]
    assert all(p.prompt and p.answer is not None for p in problems)
    assert not {p.prompt for p in problems[:3]} & {p.prompt for p in problems[3:]}


def test_addition_yaml_is_the_demo_and_addition_grpo_its_baseline():
    """The README shows the demo's figures beside these files, so they must stay the same runs."""
    by_name = {p.stem: TrainConfig.from_yaml(p) for p in CONFIGS}
    for name, run in (("addition", "sagc"), ("addition_grpo", "fixed-16")):
        ours = next(r for r in demo.RUNS if r.folder == run)
        theirs = demo.demo_config(ours, Path("runs/demo"), steps=None, seed=0, is_quick=False)
        assert set(changed_fields(theirs, by_name[name])) <= {"run_dir", "checkpoint.every", "checkpoint.keep_best"}


def test_smollm2_prompts_end_where_the_answer_begins():
    config = TrainConfig.from_yaml(next(p for p in CONFIGS if p.stem == "smollm2_chain_sum"))
    problem = make_task(config.task).problem("heldout", 0)
    *shots, last = problem.prompt.split("\n")
    assert len(shots) == config.task["few_shot"]
    assert last.endswith(" =")
    assert problem.stop == ("\n",)
