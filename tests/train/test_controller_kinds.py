"""Controllers beyond the paper in the loop: who gets which group size, what is written, and that a run continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_tiny import STEP_FIELDS, assert_same_run, crash_after, events, read

from sagc_fast.config import ControllerOptions
from sagc_fast.controller import CostAwareConfig, CostAwareSAGC, PromptAwareSAGC, SAGCConfig
from sagc_fast.errors import ConfigError
from sagc_fast.report import write_report
from sagc_fast.train.parts import build_controller
from sagc_fast.train.trainer import Trainer

CONTROLLER = {
    "kind": "prompt_aware", "candidates": [2, 4, 8], "tau": 1.5, "delta": 0.5, "lambda_0": 4.0, "strength": 0.5
}  # fmt: skip


@pytest.fixture
def few(tiny, tmp_path):
    """``few(...)``: as ``tiny``, with five questions that come back, three per step."""
    path = tmp_path / "questions.jsonl"
    texts = ("1+2=", "3+4=", "5+5=", "7-1=", "9-9=")
    path.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in texts))
    task = {"name": "dataset", "path": str(path), "reward": "train_scorers:digits"}

    def make(**sections):
        slow = {"learning_rate": 1e-3}  # a fast learner's lengths are all alike after a few steps
        defaults = {"steps": 8, "evaluation": {"num_problems": 0}, "controller": CONTROLLER, "optimizer": slow}
        config = tiny(**{**defaults, **sections})
        values = config.to_dict() | {"task": task}
        return type(config).from_dict(values)

    return make


def listen(trainer: Trainer) -> tuple[list, list]:
    """(group sizes of every call to the engine, keyword arguments of every observation), filled while it trains."""
    asked, observed = [], []
    build = trainer._build

    def build_and_listen(*args):
        build(*args)
        generate, observe = trainer.engine.generate, trainer.controller.observe

        def generate_and_note(prompts, group_size, *rest, **named):
            asked.append(group_size)
            return generate(prompts, group_size, *rest, **named)

        def observe_and_note(lengths, **named):
            observed.append({"lengths": lengths, **named})
            observe(lengths, **named)

        trainer.engine.generate, trainer.controller.observe = generate_and_note, observe_and_note

    trainer._build = build_and_listen
    return asked, observed


def test_every_prompt_gets_the_size_that_a_controller_alone_would_give_it(few):
    config = few()
    trainer = Trainer(config)
    asked, observed = listen(trainer)
    trainer.fit()
    trace, steps = read(Path(config.run_dir) / "lengths.jsonl"), events(config.run_dir, "step")
    alone = PromptAwareSAGC(
        SAGCConfig(candidates=(2, 4, 8), tau=1.5, delta=0.5, lambda_0=4.0), seed=config.seed, strength=0.5
    )
    for record, line, sizes, seen in zip(steps, trace, asked, observed, strict=True):
        assert list(sizes) == alone.decide_groups(line["problem_ids"]) == [len(group) for group in line["lengths"]]
        assert record["group_size"] == line["group_size"] == alone.decide()
        assert record["group_size_mean"] == pytest.approx(sum(sizes) / 3)
        assert record["group_size_counts"] == {str(g): list(sizes).count(g) for g in sorted(set(sizes))}
        assert (seen["lengths"], seen["problem_ids"]) == (line["lengths"], line["problem_ids"])
        clipped = sum(length == 12 for group in line["lengths"] for length in group)
        assert seen["num_clipped"] <= clipped, "a completion that ends with its last token is not cut"
        assert record["clipped_ratio"] == pytest.approx(seen["num_clipped"] / sum(sizes))
        alone.observe(line["lengths"], problem_ids=line["problem_ids"], num_clipped=seen["num_clipped"])
        gauges = alone.gauges()
        assert (record["lambda"], record["arms"]) == (gauges["lambda"], gauges["arms"])
        assert set(record) >= STEP_FIELDS
    assert any(len(set(sizes)) > 1 for sizes in asked), "the test needs a step with unequal groups"


@pytest.mark.parametrize("algo", ["grpo", "dapo"])
def test_a_prompt_aware_run_resumes_to_the_bit(few, tmp_path, algo):
    Trainer(few(run_dir=tmp_path / "straight", algo={"name": algo})).fit()
    broken = few(run_dir=tmp_path / "broken", algo={"name": algo})
    trainer = Trainer(broken)
    crash_after(trainer, step=5)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert len(events(broken.run_dir, "step")) == 5
    Trainer(broken, resume=True).fit()
    assert_same_run(tmp_path / "straight", tmp_path / "broken", step=8)


def test_the_cost_aware_controller_is_told_the_seconds_and_says_what_it_fitted(few):
    config = few(controller={"kind": "cost_aware", "candidates": [2, 4], "utility": "informative"})
    trainer = Trainer(config)
    asked, observed = listen(trainer)
    trainer.fit()
    steps = events(config.run_dir, "step")
    alone = CostAwareSAGC(CostAwareConfig(candidates=(2, 4), utility="informative", tau=1.5))
    for record, seen, size in zip(steps, observed, asked, strict=True):
        assert record["group_size"] == size == alone.decide()
        assert seen["seconds"] == record["rollout_seconds"] + record["update_seconds"] > 0
        alone.observe(**seen)
        gauges = alone.gauges()
        assert record["costs"] == {name: gauges[name] for name in record["costs"]}
        assert set(record) >= STEP_FIELDS
        assert record["lambda"] is None
        assert not {"arms", "group_size_mean", "group_size_counts"} & set(record)
    assert trainer.controller.state_dict() == alone.state_dict()
    assert Trainer(config.with_overrides(["steps=10"]), resume=True).fit()["steps"] == 10


def test_the_report_and_the_display_show_both_kinds(few, tmp_path):
    lines = open(tmp_path / "shown.txt", "w+")  # noqa: SIM115
    folders = []
    for kind, sections in (("prompt_aware", CONTROLLER), ("cost_aware", {}), ("fixed", {"group_size": 4})):
        config = few(
            steps=4,
            run_dir=tmp_path / kind,
            controller={"candidates": [2, 4], **sections, "kind": kind},
            metrics={"display": "plain"},
        )
        Trainer(config, stream=lines).fit()
        folders.append(tmp_path / kind)
    lines.seek(0)
    sizes = [line.split()[3] for line in lines if line.startswith("step ")]
    assert all("." in size for size in sizes[:4]), "the mean of the prompts' sizes"
    assert set(sizes[8:]) == {"4"}
    lines.close()
    page = write_report(folders, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "posteriors-0" in page
    assert "posteriors-1" not in page
    for single in folders:
        assert write_report([single], tmp_path / "one.html").stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["prompt_aware", "cost_aware"])
def test_another_kinds_state_is_refused(kind):
    options = ControllerOptions(kind=kind)
    with pytest.raises(ConfigError, match="controller state"):
        build_controller(options, 0, 12).load_state_dict(build_controller(ControllerOptions(), 0, 12).state_dict())
